"""A swarm in one process with exchange "reduced": its replicas agree, and it can be interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.experiment.in_process_swarm import LocalSwarm
from protocol.spec.run import RunSpec
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def spec(**overrides: object) -> RunSpec:
    """Two full replicas and a pipeline of four members."""
    small = {"swarm.replicas": 2, "inner.steps": 1, "inner.microbatches": 1, "inner.microbatch_size": 1}
    return spec_of(**{**small, "rounds": 3, "data.validation_batches": 1, **overrides})


def digests(swarm: LocalSwarm) -> set[tuple[str, ...]]:
    """Of all replicas: one entry where they agree."""
    return {
        tuple(member.outer[stage].digest() for member in replica.members for stage in member.stages)
        for replica in swarm.replicas
    }


def test_a_reduction_without_loss_is_the_gathered_exchange() -> None:
    # Clipping compares whole payloads where they are gathered, and their parts where they are reduced.
    exact = {"outer.top_k": 0, "outer.quantizer": "none", "outer.clip": 8.0}
    gathered, reduced = (
        LocalSwarm(spec(**exact, **{"outer.exchange": each})) for each in ("gathered", "reduced")
    )
    for _ in range(2):
        gathered.train_round()
        reduced.train_round()
    assert len(digests(gathered)) == 1
    assert digests(gathered) == digests(reduced)


def test_an_interrupted_reduction_continues_with_the_same_bits(tmp_path: Path) -> None:
    swarm, resumed = (LocalSwarm(spec(**{"outer.exchange": "reduced"})) for _ in range(2))
    for _ in range(2):
        swarm.train_round()
    swarm.save(tmp_path)
    assert resumed.restore(tmp_path)
    swarm.train_round()
    resumed.train_round()
    assert len(digests(swarm)) == 1
    assert digests(swarm) == digests(resumed)
