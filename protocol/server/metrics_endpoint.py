"""``GET /metrics`` over HTTP, for Prometheus, beside other work on one event loop.

One connection brings one request. Whatever its clients send or leave unread costs a bounded number of
connections, each with a few kilobytes for a few seconds, and one page per second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, cast

from protocol.server.listening import listen_for
from protocol.server.metrics import LOOP_LAG, Figure
from protocol.trust.host_port import host_port

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
SECONDS = 10.0
"""How long one connection may take from its beginning to its end."""
MOST_REQUEST_BYTES = 8 << 10
_PAGE_SECONDS = 1.0
"""A page is that old at most. More requests than one per second cost no more pages."""
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATH = "/metrics"
_LAG_EVERY, _LAGS = 0.5, 60


class MetricsEndpoint:
    """The port on which metrics are read. It listens from its creation on, and answers after :meth:`start`.

    If more than :data:`MOST_CONNECTIONS` are open, the oldest is closed: a client that reads the page needs a
    few milliseconds.

    Args:
        address: ``host:port``; port 0 takes a free one.

    Raises:
        HetnodeError: BAD_ADDRESS, PORT_IN_USE.
    """

    def __init__(self, address: str) -> None:
        self._socket = listen_for("metrics", "--metrics", address, "127.0.0.1:7790")
        host, port = self._socket.getsockname()[:2]
        self.address = host_port(host, port)
        self._server: asyncio.Server | None = None
        self._open: dict[_Connection, None] = {}  # in the order of their beginning
        self._lag = LoopLag()
        self._measuring: asyncio.Task[NoReturn] | None = None
        self._text: Callable[[], bytes]
        self._page, self._made_at = b"", -_PAGE_SECONDS

    async def start(self, read: Callable[[], Iterable[Figure]]) -> None:
        """Show the figures of `read` from now on; it is called on the event loop, at most once a second."""
        from protocol.server.metrics_page import MetricsPage  # noqa: PLC0415  few processes need it

        def figures() -> Iterator[Figure]:
            yield from read()
            yield LOOP_LAG.of(self._lag.seconds)

        self._text = MetricsPage(figures).text
        self._measuring = asyncio.create_task(self._lag.keep(), name="loop-lag")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=self._socket)
        log.info("metrics: http://%s%s", self.address, _PATH)

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._measuring is not None:
            self._measuring.cancel()
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in tuple(self._open):
            connection.abort()

    def page(self) -> bytes:
        """The newest page, made anew if it is older than a second."""
        now = time.monotonic()
        if now - self._made_at >= _PAGE_SECONDS:
            self._page, self._made_at = self._text(), now
        return self._page

    def opened(self, connection: _Connection) -> None:
        self._open[connection] = None
        if len(self._open) > MOST_CONNECTIONS:
            next(iter(self._open)).abort()

    def closed(self, connection: _Connection) -> None:
        self._open.pop(connection, None)


class _Connection(asyncio.Protocol):
    """One client, from its connection to the end of the answer."""

    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(self, endpoint: MetricsEndpoint) -> None:
        self._endpoint, self._request = endpoint, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self.abort)
        self._endpoint.opened(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        self._endpoint.closed(self)

    def abort(self) -> None:
        """Close the connection, whatever is still to be sent."""
        self._endpoint.closed(self)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return  # what follows a request does not count
        self._request += data[: MOST_REQUEST_BYTES + 1]
        if b"\r\n\r\n" in self._request or b"\n\n" in self._request:
            self._transport.write(self._answer())
            self._transport.close()  # once all of the answer is sent
        elif len(self._request) > MOST_REQUEST_BYTES:
            self._transport.write(_response("431 Request Header Fields Too Large"))
            self._transport.close()

    def _answer(self) -> bytes:
        words = bytes(self._request).split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request")
        method, target, _ = words
        if method != b"GET":
            return _response("405 Method Not Allowed", headers="Allow: GET\r\n")
        if target.partition(b"?")[0] != _PATH.encode():
            return _response("404 Not Found", f"The metrics are at {_PATH}.\n".encode())
        return _response("200 OK", self._endpoint.page())


class LoopLag:
    """How late the event loop does what is due, while :meth:`keep` runs."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque([0.0], maxlen=_LAGS)

    @property
    def seconds(self) -> float:
        """The longest delay within the last half minute."""
        return max(self._lags)

    async def keep(self) -> NoReturn:
        """Measure until cancelled."""
        while True:
            began = time.monotonic()  # the loop's own clock stands still during one turn of uvloop
            await asyncio.sleep(_LAG_EVERY)
            self._lags.append(max(0.0, time.monotonic() - began - _LAG_EVERY))


def _response(status: str, body: bytes = b"", headers: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"{headers}Connection: close\r\n\r\n"
    )
    return head.encode() + body
