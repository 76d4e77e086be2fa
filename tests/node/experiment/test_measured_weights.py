"""Weights by measured agreement in a swarm of one process: they change between rounds, and are saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.experiment.in_process_replica import plan_of
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.variation import Variation
from protocol.algorithm.compressed_weight import RECENT, is_compressed
from protocol.spec.link import UNCOMPRESSED
from protocol.spec.run import RunSpec
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(**overrides: Any) -> RunSpec:
    """Two full replicas and two pipelines whose links lose most of what they carry."""
    small = {
        "rounds": 12,
        "link.k": 1,
        "swarm.replicas": 2,
        "swarm.pipelines": 2,
        "inner.steps": 2,
        "inner.microbatches": 1,
        "inner.microbatch_size": 1,
        "inner.warmup_steps": 2,
        "grouping.weights": "measured",
    }
    return spec_of(**{**small, **overrides})


def weights(swarm: LocalSwarm) -> float:
    assert swarm.weights is not None
    return swarm.weights.compressed


def digests(swarm: LocalSwarm) -> list[tuple[str, ...]]:
    return [
        tuple(member.outer[stage].digest() for member in replica.members for stage in member.stages)
        for replica in swarm.replicas
    ]


def test_compressed_replicas_get_less_weight_and_a_resumed_swarm_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    swarm, usual = LocalSwarm(measured(), resident=2), LocalSwarm(measured(**{"grouping.weights": "equal"}))
    for _ in range(RECENT):
        assert weights(swarm) == 1.0
        swarm.train_round()
        usual.train_round()
        assert digests(swarm) == digests(usual)
        assert len(set(digests(swarm))) == 1
        if swarm.position == RECENT - 1:
            swarm.save(tmp_path)
    assert weights(swarm) == 0.5
    resumed = LocalSwarm(measured())
    assert resumed.restore(tmp_path)
    assert weights(resumed) == 1.0
    for _ in range(2):
        resumed.train_round()
    swarm.train_round()
    usual.train_round()
    assert digests(swarm) == digests(resumed) != digests(usual)
    assert len(set(digests(swarm))) == 1


def test_without_two_full_replicas_nothing_can_be_told(tmp_path: Path) -> None:
    swarm = LocalSwarm(measured(**{"swarm.replicas": 1, "swarm.pipelines": 1}))
    for _ in range(RECENT + 1):
        swarm.train_round()
    assert weights(swarm) == 1.0
    uniform = measured(**{"swarm.replicas": 0})
    swarm, resumed = LocalSwarm(uniform), LocalSwarm(uniform)
    swarm.train_round()
    swarm.save(tmp_path)  # without any figure
    assert resumed.restore(tmp_path)


def test_uncompressed_pipelines_weigh_as_full_replicas() -> None:
    spec = measured()
    plan = plan_of(spec)
    *others, last = plan.replicas
    whole = replace(last, links=tuple(replace(link, k=UNCOMPRESSED) for link in last.links))
    swarm = LocalSwarm(spec, plan=replace(plan, replicas=(*others, whole)))
    for _ in range(RECENT):
        swarm.train_round()
    assert swarm.weights is not None
    factors = [swarm.weights.factor_of(replica) for replica in swarm.plan.replicas]
    assert factors == [1.0, 1.0, 0.5, 1.0]
    assert [is_compressed(replica) for replica in swarm.plan.replicas] == [False, False, True, False]


def test_replicas_that_average_their_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect where replicas average"):
        LocalSwarm(measured(), variation=Variation(average_gradients=True))


@pytest.mark.parametrize(
    ("options", "rounds"),
    [({"outer.dense_every": 2}, {1, 3}), ({"outer.selection": "random", "outer.top_k": 64}, {1, 2, 3})],
    ids=["dense", "random"],
)
def test_rounds_that_are_not_dense_are_measured_whatever_is_sent(
    options: dict[str, Any], rounds: set[int]
) -> None:
    swarm = LocalSwarm(measured(**options))
    for _ in range(3):
        swarm.train_round()
    assert len(set(digests(swarm))) == 1
    assert swarm.weights is not None
    figures = swarm.weights.state_dict()["measured-weights/figures"]
    assert set(figures[:, 0].tolist()) == rounds
