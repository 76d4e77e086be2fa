"""The newest lines of this process's log, for commands of the same machine."""

from __future__ import annotations

import logging
from collections import deque
from typing import Self

from protocol.server.terminal import VisibleFormatter

_MOST_LINES, _MOST_CHARACTERS = 300, 500


class RecentLog(logging.Handler):
    """Keeps the newest lines of the root logger inside its ``with`` block: bounded, and only in memory."""

    def __init__(self, most: int = _MOST_LINES) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=most)
        self.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s", "%m-%d %H:%M:%S"))

    @property
    def lines(self) -> list[str]:
        """The oldest first."""
        return list(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.extend(line[:_MOST_CHARACTERS] for line in self.format(record).splitlines())
        except Exception:
            self.handleError(record)

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
