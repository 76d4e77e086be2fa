"""Records that no sample can be made of: a few are left out, many end the reading."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from protocol.errors import HetnodeError

log = logging.getLogger(__name__)

ONE_IN = 20
"""The share of records that may be left out: one of this number."""
_EARLY = 10_000
"""A source with fewer records is judged as if it had this number, until its end is known."""
_SHORT = 100
"""The same for a part of a source, also at its end: it may be short."""


class LeftOut:
    """Counts what is left out of a sequence, in one pass, by itself or as a part of others."""

    def __init__(self, what: str, early: int = _EARLY) -> None:
        self._what, self._early = what, early
        self._count = self._bad = 0
        self._first: HetnodeError | None = None

    def good(self, count: int = 1) -> None:
        self._count += count

    def bad(self, why: HetnodeError) -> None:
        """Leave one out. Raises the first reason, with numbers, once they are too many."""
        self._count += 1
        self._bad += 1
        self._first = self._first or why
        if self._bad * ONE_IN > max(self._count, self._early):
            raise self._too_many(self._first)
        if str(self._bad).strip("0") == "1":
            log.warning("%d of %d %s left out so far: %s", self._bad, self._count, self._what, why.cause)

    def end(self, is_part: bool) -> None:
        """Raises as `bad`, for a sequence that was shorter."""
        least = _SHORT if is_part and self._bad < self._count else 0
        if self._first and self._bad * ONE_IN > max(self._count, least):
            raise self._too_many(self._first)

    def _too_many(self, first: HetnodeError) -> HetnodeError:
        cause = f"{first.cause} {self._bad} of {self._count} {self._what} are bad; 1 in {ONE_IN} may be."
        return HetnodeError(first.code, cause, first.remedy)


def without_bad(records: Iterable[str | HetnodeError], is_part: bool) -> Iterator[tuple[int, str]]:
    """The texts among `records`, each with its ordinal among all of them, which bad ones do not change.

    A record that has no text stands as the reason. Which ones are left out follows from the records alone.
    `is_part` says that the source has more of them.
    """
    skipped = LeftOut("records")
    for ordinal, record in enumerate(records):
        if isinstance(record, str):
            skipped.good()
            yield ordinal, record
        else:
            skipped.bad(record)
    skipped.end(is_part)
