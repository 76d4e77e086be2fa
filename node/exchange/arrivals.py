"""Payloads on their way to this peer, which passes them on while they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable


class Arrival:
    """The bytes of one payload that one other peer sends. Belongs to one event loop.

    The bytes are verified only when all are there. So the last byte is passed on after that: what this peer
    has passed on completely is right, and wrong bytes of its sender cost the next receiver only time.

    Args:
        when_begun: called when the first bytes have arrived.

    Attributes:
        nbytes: of the whole payload.
        data: the bytes so far.
    """

    def __init__(self, nbytes: int, when_begun: Callable[[Arrival], None]) -> None:
        self.data = bytearray()
        self.nbytes, self._when_begun = nbytes, when_begun
        self._clock = asyncio.get_running_loop().time
        self._began = 0.0
        self._is_verified = self._is_over = False
        self._progress = asyncio.Event()  # set and then replaced with each change

    def add(self, chunk: bytes) -> None:
        is_first = not self.data
        self.data += chunk
        if is_first:
            self._began = self._clock()
            self._when_begun(self)
        self._has_changed()

    def verify(self) -> None:
        """Note that all bytes have arrived and are right."""
        self._is_verified = True
        self._has_changed()

    def end(self) -> None:
        """Note that no more bytes come."""
        self._is_over = True
        self._has_changed()

    def drop(self) -> None:
        """Free the memory if no more bytes come; who still reads them gets no more."""
        if self._is_over:
            self.data = bytearray()
            self._has_changed()

    def seconds_left(self) -> float:
        """Until all bytes have arrived, as fast as they have come so far."""
        missing = self.nbytes - len(self.data)
        return (self._clock() - self._began) * missing / len(self.data) if self.data else float("inf")

    async def pieces(self, size: int) -> AsyncIterator[bytes]:
        """The bytes as they come, at most `size` at a time.

        They end early if the payload does not arrive, or is wrong.
        """
        sent = 0
        while sent < self.nbytes:
            ready = min(len(self.data), self.nbytes - (not self._is_verified))
            if ready > sent:
                piece = bytes(self.data[sent : min(ready, sent + size)])
                sent += len(piece)
                yield piece
            elif self._is_over:
                return
            else:
                await self._progress.wait()

    def _has_changed(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()
