"""Two TCP connections of which each gets the other's bytes, with bounded buffers and a bounded rate."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

from protocol.trust.rate_limit import ByteRate

_BUFFER_BYTES = 256 << 10
_LAST_BYTES_SECONDS = 10.0
_LEAST_PAUSE = 0.002
"""Shorter pauses are left out: the rate holds in the long run."""


class SpliceEnd(asyncio.Protocol):
    """One end of a splice: what comes in here goes out at the other end, no faster than that takes it.

    Before :meth:`join` it keeps what comes in, and stops reading after each piece until :meth:`more`.

    Attributes:
        source: of the connection, for messages and limits.
        rate: bounds the bytes that come in here; several ends may share one.
        first: what has come in before :meth:`join`.
        lost: done when the connection is closed.
    """

    def __init__(self, source: str = "") -> None:
        self.source = source
        self.rate: ByteRate | None = None
        self.first = bytearray()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._other: SpliceEnd | None = None
        self._news = asyncio.Event()
        self._holds = 0  # reasons not to read now

    @property
    def port(self) -> int:
        """Of the other machine; 0 if it is not connected."""
        address = self._transport.get_extra_info("peername") if self._transport is not None else None
        return int(address[1]) if address else 0

    async def more(self, than: int = 0) -> None:
        """Wait until `first` has more than `than` bytes. Raises ConnectionResetError if it is closed."""
        while not self.lost.done():
            if len(self.first) > than:
                return
            self._news.clear()
            self._resume()
            await self._news.wait()
        raise ConnectionResetError("closed before it said enough")

    def join(self, other: SpliceEnd) -> None:
        """Copy both ways from now on, beginning with what each end has kept."""
        self._other, other._other = other, self
        for each in (self, other):
            first, each.first = bytes(each.first), bytearray()
            if first:
                each.data_received(first)
            each._resume()
        if self.lost.done():
            other.close()
        if other.lost.done():
            self.close()

    def close(self) -> None:
        """Close the connection after what is still to be written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def write(self, data: bytes) -> None:
        """Send bytes of one's own ahead of the splice."""
        if self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self.first += data
            self._pause()
            self._news.set()
            return
        self._other.write(data)
        if self.rate is not None:
            loop = asyncio.get_running_loop()
            pause = self.rate.take(len(data), loop.time())
            if pause > _LEAST_PAUSE:
                self._hold()
                loop.call_later(pause, self._release)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other._hold()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other._release()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self._news.set()
        if self._other is not None:
            self._other.close()

    def _hold(self) -> None:
        self._holds += 1
        self._pause()

    def _release(self) -> None:
        self._holds = max(0, self._holds - 1)  # 0: it was full before there was another end
        self._resume()

    def _pause(self) -> None:
        # A connection that is closing has nothing more to read.
        if self._transport is not None:
            with suppress(RuntimeError):
                self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and not self._holds:
            with suppress(RuntimeError):
                self._transport.resume_reading()


async def carry(one: SpliceEnd, other: SpliceEnd) -> None:
    """Join two ends, and wait until both are closed. Whatever ends this, both are closed then.

    The end that is closed first closes the other one, which may have bytes left to write for some seconds.
    """
    try:
        one.join(other)
        await asyncio.wait((one.lost, other.lost), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((one.lost, other.lost), timeout=_LAST_BYTES_SECONDS)
    finally:
        one.abort()
        other.abort()
