"""Fetches the page of a run (:mod:`protocol.wire.run_page`) from the web server of its operator."""

from __future__ import annotations

import re
from http.client import HTTPException
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.run_page import MOST_BYTES, PATH

_SECONDS = 15.0
_DOMAIN = re.compile(r"([a-z0-9-]+\.)+([a-z]{2,63}|xn--[a-z0-9-]+)(:[0-9]+)?/?", re.IGNORECASE | re.ASCII)


def page_url(text: str) -> str | None:
    """Where the page of a run is that `text` names, ``https://HOST/`` or a domain; None if it is neither.

    Raises HetnodeError BAD_ADDRESS for http, but to this machine, and for what is no address of a host.
    """
    address = f"https://{text}" if _DOMAIN.fullmatch(text) else text
    if not address.lower().startswith(("http://", "https://")):
        return None
    parts = _checked(address)
    return f"{parts.scheme}://{parts.netloc}{PATH}"


def fetch_page(url: str, seconds: float = _SECONDS) -> bytes:
    """The document at `url`, of at most MOST_BYTES and one more.

    Raises HetnodeError: COORDINATOR_UNREACHABLE; BAD_ADDRESS if it leads elsewhere than :func:`page_url` may.
    """
    # A thread, because a server that sends a byte now and then would never exceed the timeout of a socket.
    answered: SimpleQueue[bytes | HetnodeError] = SimpleQueue()
    Thread(target=lambda: answered.put(_fetched(url)), daemon=True).start()
    try:
        found = answered.get(timeout=seconds)
    except Empty:
        found = _unreached(url, f"no answer within {seconds:.0f} s")
    if isinstance(found, HetnodeError):
        raise found
    return found


class _SameScheme(HTTPRedirectHandler):
    max_redirections = 4

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if _checked(newurl).scheme != urlsplit(req.full_url).scheme:
            raise _bad_address(newurl, "a page must not lead to another scheme")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str) -> bytes | HetnodeError:
    request = Request(url, headers={"User-Agent": "hetnode", "Accept": "application/json"})
    try:
        with build_opener(_SameScheme).open(request, timeout=_SECONDS) as answer:
            return bytes(answer.read(MOST_BYTES + 1))
    except HetnodeError as error:
        return error
    except HTTPError as error:
        return _unreached(url, f"it answers {error.code}, so it publishes no run")
    except (OSError, HTTPException, ValueError) as error:
        return _unreached(url, str(error.reason if isinstance(error, URLError) else error) or repr(error))


def _checked(address: str) -> Any:
    """The parts of an address that may be fetched. Raises HetnodeError BAD_ADDRESS."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _bad_address(address, str(error)) from None
    if not host or parts.username is not None:
        raise _bad_address(address, "it names no host, or a user")
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host)):
        return parts
    raise _bad_address(address, "without encryption its answer can be changed on the way")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bad_address(address: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_ADDRESS,
        f"{address!r:.200} is not the address of a run's page: {why}.",
        "Give https://HOST/, or the invite that the operator has sent.",
    )


def _unreached(url: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.COORDINATOR_UNREACHABLE,
        f"No page of a run is at {url}: {why[:300]}.",
        "Check the address, and the clock here; or ask the operator for an invite. A run is published by "
        "'hetnode coordinator --open' or '--contact'.",
    )
