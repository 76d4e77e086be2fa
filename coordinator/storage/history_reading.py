"""What the queries of a history share: its connection, pages, and thinned lists."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from coordinator.history.queries import MOST_ROWS
from coordinator.history.records import Page, Traffic
from coordinator.storage.history_schema import HISTORY_ID, HISTORY_VERSION
from protocol.errors import ErrorCode, HetnodeError

Row: TypeAlias = tuple[Any, ...]

TRAFFIC = ("link_bytes", "link_bytes_dense", "payload_bytes", "payload_bytes_dense")
"""The columns of a traffic, as many tables have them."""


def no_history(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NO_HISTORY,
        f"The history {path} cannot be read: {why}.",
        "The coordinator writes it again from its event log when it starts: start it once on that folder.",
    )


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that sees one moment of the history. Raises NO_HISTORY, also for errors within.

    One for each query: opening takes below a millisecond, and no query sees a file that was replaced since.
    """
    try:
        with closing(_connect(path)) as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if (application, version) != (HISTORY_ID, HISTORY_VERSION):
                raise no_history(path, "it is not complete, or another version of hetnode wrote it")
            db.execute("BEGIN")
            yield db
    except sqlite3.Error as error:
        missing = "" if path.exists() else "there is none"
        raise no_history(path, missing or str(error)) from None


def _connect(path: Path) -> sqlite3.Connection:
    # The path as a URI: a question mark in a folder's name would end it.
    uri = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)


def part(page: Page) -> tuple[int, int]:
    """LIMIT and OFFSET of `page`."""
    return within(page.most), max(0, page.skip)


def within(most: int) -> int:
    """`most`, as far as a query returns so many rows."""
    return max(1, min(most, MOST_ROWS))


def stride(span: Sequence[int | None], most: int) -> tuple[int, int]:
    """The first round, and of how many rounds one point must stand, for at most `most` points.

    `span`: the first and the last round, or None where there are none.
    """
    first, last = span
    if first is None or last is None:
        return 0, 1
    return first, (last - first) // within(most) + 1


def seconds(milliseconds: int) -> float:
    return milliseconds / 1000


def optional_seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def traffic(columns: Sequence[int | float]) -> Traffic:
    """Of the four columns :data:`TRAFFIC`; sums beyond 2^63 are inexact."""
    return Traffic(*map(int, columns))
