"""How much of its machine's internet connection a node may use, in each direction.

All processes of a node that send or receive share one account for each direction: a file that holds the time
at which the bytes so far will have passed at the permitted rate. To send, a process adds the seconds of its
bytes under a lock, and waits until the former time. So the sum of all processes obeys the limit, whichever of
them sends, and a process that dies holds nothing up: the kernel drops its lock.

Within any t seconds pass at most ``rate * (t + BURST_SECONDS)`` bytes, and one message of each stream.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

BURST_SECONDS = 0.25  # of unused time that may be made up for: timers are late on a busy machine
_PIECE_SECONDS = 0.1  # others get their turn between two pieces
_LEAST_PIECE, _MOST_PIECE = 4 << 10, 256 << 10
_VARIABLE = "HETNODE_LINE"

_RATES = struct.Struct("<dd")
_TIME = struct.Struct("<d")


@dataclass(frozen=True)
class LineLimits:
    """Bytes per second that may be sent and received; 0 is no limit."""

    upload: float = 0.0
    download: float = 0.0


class Direction:
    """One direction of a line: at most `rate` bytes per second; 0 is no limit.

    `passed` counts the bytes of this process.
    """

    def __init__(self, rate: float = 0.0, file: int = -1, offset: int = 0) -> None:
        self.rate, self._file, self._offset = rate, file, offset
        self.passed = 0
        self.piece_bytes = int(min(max(rate * _PIECE_SECONDS, _LEAST_PIECE), _MOST_PIECE)) if rate else 0

    async def take(self, nbytes: int) -> None:
        """Wait until `nbytes` more may pass. Others get their turn meanwhile."""
        self.passed += nbytes
        while self.rate and nbytes > 0:
            piece = min(nbytes, self.piece_bytes)
            nbytes -= piece
            if (seconds := self._reserve(piece / self.rate)) > 0:
                await asyncio.sleep(seconds)

    def pieces(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """`data` in pieces that follow each other soon, without copying; whole without a limit."""
        view = memoryview(data)
        size = self.piece_bytes or len(view) or 1
        for start in range(0, len(view), size):
            yield view[start : start + size]

    def cap(self, rate: float) -> float:
        """A measured rate, or 0 for an unknown one, as this limit makes it."""
        return min(rate or self.rate, self.rate) if self.rate else rate

    def _reserve(self, seconds: float) -> float:
        """Add `seconds` to the account; returns how long to wait before the bytes may pass."""
        # Every process has its own open file, so that the lock also excludes the others.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            now = time.monotonic()  # the same for all processes of a machine
            (free,) = _TIME.unpack(os.pread(self._file, _TIME.size, self._offset))
            begins = max(float(free), now - BURST_SECONDS)
            os.pwrite(self._file, _TIME.pack(begins + seconds), self._offset)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return begins - now


class Line:
    """Both directions of a node's connection to the internet. Without a `file` there is no limit."""

    def __init__(self, limits: LineLimits | None = None, file: Path | None = None) -> None:
        self.file = file
        if limits is None or file is None:
            self.up, self.down = Direction(), Direction()
            return
        opened = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        self.up = Direction(limits.upload, opened, _RATES.size)
        self.down = Direction(limits.download, opened, _RATES.size + _TIME.size)

    @classmethod
    def create(cls, limits: LineLimits, file: Path) -> Self:
        """A new account in `file`, which no other process uses. Without limits there is no file."""
        if limits == LineLimits():
            return cls()
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(_RATES.pack(limits.upload, limits.download) + 2 * _TIME.pack(0.0))
        return cls(limits, file)

    @classmethod
    def from_environment(cls) -> Self:
        """The account of the node of which this process is a part. Opens the file anew."""
        path = os.environ.get(_VARIABLE)
        if not path:
            return cls()
        limits = LineLimits(*_RATES.unpack(Path(path).read_bytes()[: _RATES.size]))
        return cls(limits, Path(path))

    @property
    def environment(self) -> dict[str, str]:
        """For processes that call :meth:`from_environment`."""
        return {} if self.file is None else {_VARIABLE: str(self.file.absolute())}


UNLIMITED = Line()
