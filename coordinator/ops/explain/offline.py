"""Answers about a run from the folder of its coordinator, which need not run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.ops.explain.explain import explain
from coordinator.run.state.events import Event
from coordinator.store.history import SqliteHistory
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.history_writer import write_events
from coordinator.store.last_status import copied, events_in, first_state
from protocol.status import Explanation


def last_explanation(folder: Path, question: str) -> Explanation:
    """The answer to `question` (:mod:`coordinator.ops.explain.questions`) as of the newest event in the log.

    The history comes from the log: that in `folder` may lack the last events of a killed coordinator.

    Raises HetnodeError STORE_CORRUPT, BAD_OPTION.
    """
    with copied(folder) as copy, TemporaryDirectory(prefix="hetnode-") as scratch:
        path = Path(scratch, HISTORY_FILE)
        state = write_events(path, first_state(folder, copy), events_in(copy))

        def read(first: int, last: int, kinds: Collection[type[Event]] = ()) -> list[tuple[int, Event]]:
            found = events_in(copy, first, last)
            return [each for each in found if not kinds or type(each[1]) in kinds]

        return explain(question, state, SqliteHistory(path), read, state.latest_at)
