"""A swarm on one machine: which nodes it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node import command_runner
from node.local_swarm import roles_to_start
from protocol.errors import FAILURE_FILE, ErrorCode, HetnodeError
from protocol.types import Role
from tests.builders import spec_of


@pytest.mark.parametrize(("members", "stage_peers"), [(0, 8), (3, 6)])
def test_a_swarm_starts_as_many_nodes_as_its_run_needs(members: int, stage_peers: int) -> None:
    """Where pipelines have fewer members than stages, too: the run would refuse the others."""
    spec = spec_of(stages=4, replicas=1, pipelines=2, swarm__members=members)
    assert roles_to_start(spec) == [Role.REPLICA] + [Role.STAGE] * stage_peers


def test_a_process_writes_its_failure_for_the_program_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "failure"
    monkeypatch.setenv(FAILURE_FILE, str(file))
    error = HetnodeError(ErrorCode.PORT_IN_USE, "Port 7700 is taken.", "Take another one.")
    assert command_runner.exit_code_after(error) is error.code.exit_code
    assert json.loads(file.read_text()) == {"code": error.code.label, "cause": error.cause}
