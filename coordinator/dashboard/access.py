"""Who may read the dashboard: a request's Host on loopback, and the token elsewhere.

A web page of a stranger can make a browser on this machine send requests here, under a name that the stranger
lets point to 127.0.0.1. The browser then sends that name as Host, so other names than those of loopback are
refused.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

COOKIE_SECONDS = 30 * 86400


class Access:
    """The rule of one dashboard.

    Args:
        token: that readers need; "" admits everybody whose request names a host of loopback.
        run: the id of the run. Dashboards of several runs at one host have cookies of their own.
    """

    def __init__(self, token: str, run: str) -> None:
        self._token = token.encode()
        self.needs_token = bool(token)
        self.cookie_name = f"hetnode-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
        # The token cannot be computed from the cookie.
        self.cookie = hmac.new(self._token, b"hetnode dashboard", "sha256").hexdigest() if token else ""

    def admits_host(self, host: str) -> bool:
        """Whether a request with this Host may be answered at all."""
        return self.needs_token or _is_loopback(host)

    def admits(self, cookie: str | None) -> bool:
        """Whether a request with this cookie may read."""
        return not self.needs_token or hmac.compare_digest((cookie or "").encode(), self.cookie.encode())

    def is_token(self, given: str) -> bool:
        """Whether this is the token; the time that it takes tells nothing about it."""
        return self.needs_token and hmac.compare_digest(given.strip().encode(), self._token)


def _is_loopback(host: str) -> bool:
    """Whether `host`, as in a Host header with or without a port, is a name of this machine's loopback."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return False
    else:
        name = host.rpartition(":")[0] or host
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
