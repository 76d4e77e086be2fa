"""Requests to an object store by URLs that the coordinator has signed.

The store is not trusted, and a URL not much more: it leads to no place that is nearer than the coordinator
itself, so that nobody makes a node call services of its own machine or network. No redirect is followed, no
proxy asked. A body has the length that the caller expects, or is refused; what it says is up to a hash. No
message of an error has a URL, because its query is a secret.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

import h11

from node.checkpoint.download import TransferError, WrongBytes
from node.exchange.transfer import NotHeld
from protocol.server.line import UNLIMITED, Line
from protocol.wire.object_calls import CHECKSUM_HEADER, CONTENT_TYPE, distance

SILENT_SECONDS = 10.0
"""The longest wait for an answer, for the next bytes, and until the store has taken some."""
_READ_BYTES = 64 * 1024
_MOST_URL = 8192
_MOST_ADDRESSES = 4
_MOST_HEADERS = 32 * 1024


class ObjectClient:
    """Belongs to one event loop. Calls end by themselves if the store is silent for SILENT_SECONDS.

    Args:
        line: what this node may send and receive.
    """

    def __init__(self, line: Line = UNLIMITED) -> None:
        self._line = line

    async def put(self, url: str, data: bytes, sha256: str, nearest: int) -> None:
        """Upload `data`, whose hash (hex) is `sha256`. Raises TransferError."""
        headers = {
            "content-length": str(len(data)),
            "content-type": CONTENT_TYPE,
            CHECKSUM_HEADER: base64.b64encode(bytes.fromhex(sha256)).decode(),
        }
        async with _connected(url, nearest) as connection:
            await connection.send("PUT", headers)
            for piece in self._line.up.pieces(data):
                await self._line.up.take(len(piece))
                await connection.send_body(piece)
            status, _ = await connection.answer()
        if status != 200:
            raise TransferError(f"the store took no object: status {status}")

    async def get(self, url: str, nbytes: int, nearest: int, first: int | None = None) -> bytes:
        """An object of `nbytes` bytes; or so many of its bytes from `first` on.

        Raises NotHeld where there is no such object yet; WrongBytes for another length; TransferError.
        """
        headers = {} if first is None else {"range": f"bytes={first}-{first + nbytes - 1}"}
        async with _connected(url, nearest) as connection:
            await connection.send("GET", headers)
            status, length = await connection.answer()
            if status == 404:
                raise NotHeld("the store has no such object")
            if status != (200 if first is None else 206):
                raise TransferError(f"the store sent no object: status {status}")
            if length is not None and length != nbytes:
                raise WrongBytes(f"the store has {length} bytes of {nbytes}")
            data = bytearray()
            while piece := await connection.body():
                if len(piece) > nbytes - len(data):
                    raise WrongBytes(f"the store sent more than {nbytes} bytes")
                data += piece
                await self._line.down.take(len(piece))
        if len(data) < nbytes:
            raise TransferError(f"the store sent {len(data)} of {nbytes} bytes")
        return bytes(data)


class _Connection:
    """One request over one connection. Every wait is bounded. Raises TransferError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str) -> None:
        self._reader, self._writer, self._url = reader, writer, urlsplit(url)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEADERS)

    async def send(self, method: str, headers: dict[str, str]) -> None:
        target = f"{self._url.path or '/'}?{self._url.query}"
        host = self._url.netloc.rpartition("@")[2]
        fields = {"host": host, "connection": "close", **headers}
        await self._write(
            self._http.send(h11.Request(method=method, target=target, headers=[*fields.items()]))
        )

    async def send_body(self, data: bytes | memoryview) -> None:
        await self._write(self._http.send(h11.Data(data=bytes(data))))

    async def answer(self) -> tuple[int, int | None]:
        """Status and length of the answer, if the latter is told."""
        self._http.send(h11.EndOfMessage())  # of a request with a length: there is nothing to write
        while isinstance(event := await self._next(), h11.InformationalResponse):
            pass
        assert isinstance(event, h11.Response), "h11 begins an answer with it"
        told = [value for name, value in event.headers if name == b"content-length"]
        return event.status_code, int(told[0]) if told else None

    async def body(self) -> bytes:
        """The next bytes of the body; none at its end."""
        event = await self._next()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(SILENT_SECONDS):
                self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def _write(self, data: bytes | None) -> None:
        self._writer.write(data or b"")
        async with asyncio.timeout(SILENT_SECONDS):
            await self._writer.drain()


@asynccontextmanager
async def _connected(url: str, nearest: int) -> AsyncIterator[_Connection]:
    """A connection to the host of `url`. Raises TransferError for whatever the network or the store does."""
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            reader, writer = await _open(url, nearest)
        try:
            yield _Connection(reader, writer, url)
        finally:
            writer.transport.abort()  # nothing that is not written matters any more
    except TimeoutError:
        raise TransferError("the store does not answer") from None
    except (OSError, h11.ProtocolError, ValueError) as error:
        # The texts of other errors may quote a URL.
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise TransferError(f"the connection to the store failed: {why}") from None


async def _open(url: str, nearest: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    if len(url) > _MOST_URL or parts.scheme not in ("http", "https") or not parts.hostname:
        raise TransferError("this is no URL of a store")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    allowed = [each for each in addresses if is_allowed(each, nearest)]
    # The address that was looked at, not the name: a second answer of the resolver could be another.
    tls, name = (_tls(), parts.hostname) if parts.scheme == "https" else (None, None)
    failed = TransferError("the store is at an address that is nearer than the coordinator")
    for address in allowed[:_MOST_ADDRESSES]:
        try:
            return await asyncio.open_connection(address, port, ssl=tls, server_hostname=name)
        except OSError as error:
            failed = TransferError(f"the store cannot be reached: {error.strerror or type(error).__name__}")
    raise failed


def is_allowed(address: str, nearest: int) -> bool:
    """Whether a URL may lead to `address` if the coordinator is at distance `nearest`."""
    found = distance(ip_address(address.partition("%")[0]))
    return found is not None and found <= nearest


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
