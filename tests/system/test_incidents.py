"""Each recorded incident of tests/incidents: the rules decide as recorded, and production nodes finish it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.ops.incident.file import SUFFIX, Incident
from coordinator.ops.incident.redaction import redacted_log, redacted_spec
from coordinator.run.state import events
from tests.support.incident_file import from_bytes
from tests.support.incident_replay import replay_incident
from tests.support.paths import ROOT
from tests.virtual.incident import Kind, play_incident, script_of

FOLDER = ROOT / "tests" / "incidents"
FILES = sorted(FOLDER.glob(f"*{SUFFIX}"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(SUFFIX))


@each_file
def test_this_version_decides_as_recorded(file: Path) -> None:
    found = replay_incident(from_bytes(file.read_bytes()))
    assert found.is_equal, (found.differences[:5], found.broken)


@each_file
def test_production_nodes_come_through_the_incident(file: Path, tmp_path: Path) -> None:
    incident = from_bytes(file.read_bytes())
    log = play_incident(incident, tmp_path)
    # The log of the virtual run is an incident, too.
    spec = redacted_spec(script_of(incident).spec)
    found = replay_incident(Incident(spec, redacted_log(log)))
    assert found.is_equal, (found.differences[:5], found.broken)


@each_file
def test_an_incident_is_small_and_its_line_says_what_happened(file: Path) -> None:
    assert file.stat().st_size < 100_000
    assert f"| `{file.name}` |" in (FOLDER / "README.md").read_text()
    incident = from_bytes(file.read_bytes())
    assert incident.why
    assert incident.events


def test_there_is_a_real_run_with_kills_restarts_and_a_slow_member() -> None:
    incident = from_bytes((FOLDER / "killed-stopped-and-slow.jsonl.xz").read_bytes())
    script = script_of(incident)
    kinds = [action.kind for action in script.actions]
    assert len(script.members) == 4
    assert kinds.count(Kind.KILL) == 3
    assert kinds.count(Kind.START) == 7
    assert kinds.count(Kind.COORDINATOR_KILL) == 1
    assert sum(isinstance(event, events.PeerLost) for event in incident.events) == 3
