"""The log of refused calls: a caller that is refused ten thousand times does not write ten thousand lines."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

_WINDOW_SECONDS = 60.0
_LINES_OF_ONE, _LINES_IN_ALL = 10, 100
_NAMED = 10
"""Callers that the end of a window names; the others are counted together."""
_REMEMBERED = 1000
_OTHERS = "other callers"
_MOST_LETTERS = 500


class RefusalLog:
    """Writes some refusals of each caller in each minute, and then how many more there were."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._refused: Counter[str] = Counter()  # since the window began, by caller
        self._written: Counter[str] = Counter()

    def record(self, caller: str, error: Exception) -> None:
        """A call of `caller` was refused with `error`."""
        if not self._refused:
            asyncio.get_running_loop().call_later(_WINDOW_SECONDS, self.summarize)
        known = caller in self._refused or len(self._refused) < _REMEMBERED
        name = caller if known else _OTHERS
        self._refused[name] += 1
        if self._written[name] < _LINES_OF_ONE and self._written.total() < _LINES_IN_ALL:
            self._written[name] += 1
            self._log.warning("refused %s: %s", caller, str(error)[:_MOST_LETTERS])

    def summarize(self) -> None:
        """End the window: write how many refusals it did not write."""
        more = self._refused - self._written
        named = more.most_common(_NAMED)
        for caller, count in named:
            self._log.warning("%d more refused calls of %s", count, caller)
        if rest := more.total() - sum(count for _, count in named):
            self._log.warning("%d more refused calls of %d others", rest, len(more) - len(named))
        self._refused.clear()
        self._written.clear()
