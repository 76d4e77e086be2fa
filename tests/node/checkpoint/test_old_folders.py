"""Folders that the first release wrote still load, with the same bits."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from node.experiment.in_process_swarm import LocalSwarm
from node.worker.trainer import Trainer
from node.worker.trainer_state import private_states
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from tests.support.paths import VECTORS


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with tarfile.open(VECTORS / "saved_folders.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def expected(saved: Path) -> tuple[RunSpec, dict[str, Any]]:
    found = json.loads((saved / "expected.json").read_text())
    return RunSpec.model_validate(found["spec"]), found


def test_a_saved_swarm_loads(saved: Path) -> None:
    spec, found = expected(saved)
    swarm = LocalSwarm(spec)
    assert swarm.restore(saved / "swarm")
    assert swarm.position == 1
    (replica,) = swarm.replicas
    assert [outer.digest() for member in replica.members for outer in member.outer.values()] == found[
        "digests"
    ]
    private = hashlib.sha256()
    for state in replica.private_states().values():
        assert state.moments is not None
        parts = (state.error, state.local, state.moments["exp_avg"], state.moments["exp_avg_sq"])
        for tensors in parts:
            for name in sorted(tensors):
                private.update(tensors[name].numpy().tobytes())
    assert private.hexdigest() == found["private"]
    assert swarm.train_round().contributions == (1, 1)


def test_a_members_checkpoint_loads_and_is_written_again_with_the_same_bytes(
    saved: Path, tmp_path: Path
) -> None:
    spec, found = expected(saved)
    member = Trainer(spec, StageRange(1, 2))
    restored = member.restore(saved / "member")
    assert restored is not None
    assert restored.private is not None
    assert member.outer[1].digest() == found["digests"][1]
    assert private_states(member.state_dict())[1].moments is not None
    member.write_checkpoint(tmp_path / "again" / "round-000001", 1)
    for file in (saved / "member").rglob("*.*"):
        again = tmp_path / "again" / file.relative_to(saved / "member")
        assert again.read_bytes() == file.read_bytes(), file.name
