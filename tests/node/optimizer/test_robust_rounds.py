"""Rounds with outer.weighting "robust": equal bits wherever they are applied, and nothing is sent twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.experiment.in_process_swarm import LocalSwarm
from node.model.init import initial_parameters
from node.optimizer.embedding_follower import EmbeddingFollower
from node.optimizer.outcome import WeightedPayload
from node.optimizer.outer_stage import OuterStage
from protocol.algorithm.comparison import Comparison
from protocol.spec.run import RunSpec
from tests.support.reference import small_spec
from tests.support.running_replica import spec_of

ASSIGNED, ROBUST = (small_spec(outer={"weighting": weighting}) for weighting in ("assigned", "robust"))
WEIGHTS = (1.0, 0.5, 1.0, 2.0)
FAR = 3
"""Learns four times as much as the others, and something else: too little to be clipped."""


def trained(spec: RunSpec) -> tuple[list[OuterStage], list[dict[str, Tensor]], list[WeightedPayload]]:
    """Stages 0 of four replicas, their parameters, and the payloads of a round."""
    stages, locals_ = [], []
    for seed in range(len(WEIGHTS)):
        common, own = (torch.Generator().manual_seed(each) for each in (99, seed))
        local = initial_parameters(spec, 0)
        stages.append(OuterStage(spec, 0, local))
        for value in local.values():
            shared = torch.randn(value.shape, generator=common)
            noise = torch.randn(value.shape, generator=own)
            value.add_(0.01 * (4 * noise if seed == FAR else 3 * shared + noise))
        locals_.append(local)
    payloads = [stage.propose(local) for stage, local in zip(stages, locals_, strict=True)]
    return stages, locals_, [(each or b"", weight) for each, weight in zip(payloads, WEIGHTS, strict=True)]


def test_contributors_followers_and_the_embedding_of_others_get_equal_bits() -> None:
    stages, locals_, outcome = trained(ROBUST)
    follower = EmbeddingFollower(ROBUST, initial_parameters(ROBUST, 0)["emb"])
    follower.commit(outcome)
    late = OuterStage(ROBUST, 0, initial_parameters(ROBUST, 0))
    late.commit(outcome, False, initial_parameters(ROBUST, 0))
    stages[1].comparison = Comparison(2)
    for stage, local in zip(stages, locals_, strict=True):
        stage.commit(outcome, True, local)
    assert len({stage.digest() for stage in (*stages, late)}) == 1
    assert torch.equal(follower.table_vd, late.anchor["emb"])
    assert stages[1].agreement is not None


def test_a_far_payload_moves_the_anchor_less() -> None:
    moved = {}
    for spec in (ASSIGNED, ROBUST):
        stages, locals_, outcome = trained(spec)
        before = stages[0].anchor["emb"]
        stages[0].commit(outcome, True, locals_[0])
        moved[spec.outer.weighting] = stages[0].anchor["emb"] - before
    far = trained(ASSIGNED)[1][FAR]["emb"] - initial_parameters(ASSIGNED, 0)["emb"]
    along = {name: float((value * far).sum()) for name, value in moved.items()}
    assert 0 < along["robust"] < 0.8 * along["assigned"]


def test_of_two_payloads_robust_weights_change_no_bit() -> None:
    digests = set()
    for spec in (ASSIGNED, ROBUST):
        stages, locals_, outcome = trained(spec)
        stages[0].commit([outcome[0], outcome[FAR]], True, locals_[0])
        digests.add(stages[0].digest())
    assert len(digests) == 1


def test_a_lower_weight_returns_nothing_to_the_error_feedback() -> None:
    stages, locals_, outcome = trained(ROBUST)
    far = stages[FAR]
    assert far.pending is not None
    left = {name: error.clone() for name, error in far.pending["error"].items()}
    far.commit(outcome, True, locals_[FAR])
    assert all(torch.equal(far.error[name], error) for name, error in left.items())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("overlap", [0, 2])
def test_all_replicas_of_a_swarm_have_equal_bits_and_go_on_from_a_save(tmp_path: Path, overlap: int) -> None:
    spec, plain = (
        spec_of(
            **{
                "outer.weighting": weighting,
                "outer.overlap": overlap,
                "swarm.replicas": 2,
                "inner.steps": 3,
                "inner.microbatches": 1,
                "inner.microbatch_size": 1,
            }
        )
        for weighting in ("robust", "assigned")
    )
    swarm, resumed, usual = LocalSwarm(spec), LocalSwarm(spec), LocalSwarm(plain)
    for _ in range(2):
        swarm.train_round()
        usual.train_round()
        assert len(set(map(tuple, digests_of(swarm)))) == 1
    assert digests_of(swarm) != digests_of(usual)
    swarm.save(tmp_path)
    assert resumed.restore(tmp_path)
    assert resumed.train_round() == swarm.train_round()
    assert digests_of(resumed) == digests_of(swarm)


def digests_of(swarm: LocalSwarm) -> list[list[str]]:
    return [
        [member.outer[stage].digest() for member in replica.members for stage in member.stages]
        for replica in swarm.replicas
    ]
