"""What a coordinator knows of the run in its folder when it starts: from a snapshot, and from the log."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from coordinator.explain.log_index import LogIndex
from coordinator.history.ledger import Ledger
from coordinator.state.state import State
from coordinator.storage.decision_log import DecisionLog
from coordinator.storage.history_schema import HISTORY_FILE
from coordinator.storage.history_writer import HistoryWriter
from coordinator.storage.metrics import MetricsFile
from coordinator.storage.restore import open_log, replay_log
from coordinator.storage.run_snapshot import RunSnapshot
from coordinator.storage.snapshots import SNAPSHOT_FILE, Snapshots
from coordinator.storage.store import SqliteStore
from protocol.spec.run import RunSpec


@dataclass(frozen=True)
class RestoredRun:
    """A run as its folder has it. The tables get every later event, in order.

    `history` is not started: it begins with what its file lacks of the log.
    """

    store: SqliteStore
    state: State
    index: LogIndex
    decisions: DecisionLog
    ledger: Ledger
    metrics: MetricsFile
    history: HistoryWriter
    snapshots: Snapshots

    def keep_snapshot(self, state: State) -> None:
        """Write a snapshot if one is due. Call this when the tables have got an event that led to `state`.

        Events are stored in batches, and `state` is that after a batch: only its last event does anything.
        """
        rows, row_hash = self.store.end
        if self.index.length == self.ledger.rows == rows and self.snapshots.is_due(rows):
            known = self.index.known, self.decisions.numbers, self.ledger.known
            self.snapshots.write(RunSnapshot(rows, row_hash, state, *known))


def restore_run(
    stack: AsyncExitStack, store: SqliteStore, spec: RunSpec, run: str, folder: Path
) -> RestoredRun:
    """The run in `folder`, whose log is `store`. `stack` ends its metrics, its history and its snapshots.

    Raises HetnodeError as :func:`coordinator.storage.restore.restore`.
    """
    open_log(store, spec)
    snapshots = Snapshots(folder / SNAPSHOT_FILE, store.coordinator, store.sign)
    stack.push_async_callback(asyncio.to_thread, snapshots.close)
    former = snapshots.read(store, spec, run)
    metrics = stack.enter_context(MetricsFile(folder / "metrics.jsonl"))
    files = folder / HISTORY_FILE, spec, run, store.read, metrics.path, metrics.size
    history = HistoryWriter(*files, former.rows)
    stack.push_async_callback(asyncio.to_thread, history.close)
    stages, ledger = spec.swarm.stages, Ledger(spec, former.ledger)
    index = LogIndex(stages, former.index)
    decisions = DecisionLog(store, stages, former.decisions, former.rows)
    observers = index.note, decisions.note, ledger.record, history.pass_over
    state = replay_log(store, former.state, observers, former.rows)
    metrics.on_measurement = history.record_measurement
    return RestoredRun(store, state, index, decisions, ledger, metrics, history, snapshots)
