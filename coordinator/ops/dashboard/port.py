"""Where the dashboard listens, what the coordinator's folder says about it, and who may read it.

On loopback everybody on this machine may. Elsewhere a reader needs the token of the run, which lies in the
coordinator's folder. A web page of a stranger can make a browser on this machine send requests here, under a
name that the stranger lets point to 127.0.0.1. The browser then sends that name as Host, so other names than
those of loopback are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from coordinator.api.dashboard import forget_url, token_of, write_url
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.listening import listen_for
from protocol.trust.host_port import host_port, split_host_port

log = logging.getLogger(__name__)

COOKIE_SECONDS = 30 * 86400
_TRIES = 100
"""Ports after the usual one that are tried when it is taken."""


class DashboardPort:
    """The socket of the dashboard: it listens from its creation on.

    Attributes:
        url: such as ``http://127.0.0.1:7780/``.
        token: that readers need; "" on loopback, and without a `folder` to keep it.
    """

    def __init__(self, listener: socket.socket, folder: Path | None) -> None:
        self.socket = listener
        host, port = listener.getsockname()[:2]
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        is_loopback = address.is_loopback or bool(mapped and mapped.is_loopback)
        if address.is_unspecified:
            host = "127.0.0.1"  # one of its addresses
        self.url = f"http://{host_port(host, port)}/"
        self._folder = folder
        self.token = "" if is_loopback or folder is None else token_of(folder)
        if folder is not None:
            write_url(folder, self.url, bool(self.token))

    def close(self) -> None:
        """Stop listening, and forget the address."""
        self.socket.close()
        if self._folder is not None:
            with suppress(OSError):
                forget_url(self._folder)


def dashboard_listener(address: str | None, or_near: bool, stack: AsyncExitStack) -> socket.socket | None:
    """The socket for the dashboard, which `stack` closes; None if there is to be none.

    `or_near` takes one of the next ports if that of `address` is taken; if none is free there is none.

    Raises HetnodeError: BAD_ADDRESS, and PORT_IN_USE without `or_near`.
    """
    listener = address and (listen_near if or_near else listen)(address)
    if not listener:
        return None
    stack.callback(listener.close)
    return listener


def listen(address: str) -> socket.socket:
    """A socket that listens at `address`. Raises HetnodeError BAD_ADDRESS, PORT_IN_USE."""
    return listen_for("the dashboard", "--dashboard", address, "127.0.0.1:7780")


def listen_near(address: str) -> socket.socket | None:
    """As :func:`listen`, on one of the next ports if that is taken. None, with a line in the log, if none is
    free: the run can do without a dashboard.
    """
    host, port = split_host_port(address)
    for next_port in range(port, port + _TRIES):
        try:
            return listen(host_port(host, next_port))
        except HetnodeError as error:
            if error.code is not ErrorCode.PORT_IN_USE:
                log.warning("there is no dashboard: %s", error.cause)
                return None
    log.warning("there is no dashboard: the ports %d to %d are taken", port, port + _TRIES - 1)
    return None


class ReaderAccess:
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
