"""How many transfers each peer has open at this node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class OpenTransfers:
    """Counts the open transfers of each peer."""

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def admit(self, peer: str, what: str, most: int) -> Iterator[bool]:
        """Yield whether `peer` may open one more transfer of `what`; `most` may be open at a time."""
        key = (peer, what)
        if self._open[key] == most:
            yield False
            return
        self._open[key] += 1
        try:
            yield True
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]  # otherwise the table would grow with every payload
