"""Each recorded incident of tests/incidents: the rules decide as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.ops.incident.file import SUFFIX
from coordinator.run.state import events
from tests.support.incident_file import from_bytes
from tests.support.incident_replay import replay_incident
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "incidents"
FILES = sorted(FOLDER.glob(f"*{SUFFIX}"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(SUFFIX))
def test_this_version_decides_as_recorded(file: Path) -> None:
    incident = from_bytes(file.read_bytes())
    found = replay_incident(incident)
    assert found.is_equal, (found.differences[:5], found.broken)
    assert file.stat().st_size < 100_000
    assert incident.why
    assert f"| `{file.name}` |" in (FOLDER / "README.md").read_text(), "its line says what happened"


def test_there_is_a_real_run_with_kills_and_restarts() -> None:
    log = from_bytes((FOLDER / "killed-stopped-and-slow.jsonl.xz").read_bytes()).events
    kinds = [type(event) for event in log]
    assert kinds.count(events.PeerLost) == 3
    assert kinds.count(events.CoordinatorStarted) == 2
