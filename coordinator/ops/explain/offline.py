"""Answers about a run from the folder of its coordinator, which need not run."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.ops.explain.explain import explain
from coordinator.store.history import SqliteHistory
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.history_writer import write_events
from coordinator.store.log_copy import first_state, opened_copy
from protocol.status import Explanation


def last_explanation(folder: Path, question: str) -> Explanation:
    """The answer to `question` (:mod:`coordinator.ops.explain.questions`) as of the newest event in the log.

    The history comes from the log and the metrics file: that in `folder` may lack the last events of a killed
    coordinator.

    Raises HetnodeError STORE_CORRUPT, BAD_OPTION.
    """
    with opened_copy(folder) as (spec, store), TemporaryDirectory(prefix="hetnode-") as scratch:
        path = Path(scratch, HISTORY_FILE)
        events, metrics = enumerate(store.events(), start=1), folder / "metrics.jsonl"
        state = write_events(path, first_state(folder, spec), events, metrics)
        return explain(question, state, SqliteHistory(path), store.read, state.latest_at)
