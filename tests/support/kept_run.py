"""The folder of a coordinator that has ended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from coordinator.store.log_copy import LOG_FILE
from coordinator.store.metrics import MetricsFile
from coordinator.store.store import SqliteStore
from protocol.status import Measurement
from tests.builders import keyed
from tests.support.certificates import authority
from tests.support.coordinator_run import Run

KEY, A = keyed(9), keyed(0)


def folder_of(run: Run, folder: Path) -> Path:
    """That of the coordinator of `run`, which has ended."""
    (folder / "authority.pem").write_bytes(authority().pem)
    with MetricsFile(folder / "metrics.jsonl") as metrics:
        for number in range(1, 3):
            told = Measurement(A.peer, number, 0, 0, 3.0, 5.0 - number, complete=True, tokens=64)
            metrics.record_measurement(1.0, told)
    with closing(SqliteStore(folder / LOG_FILE, KEY.peer, KEY.sign)) as store:
        store.begin(run.spec.canonical_json)
        store.append(run.events)
    return folder
