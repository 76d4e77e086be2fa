"""Runs whose weights follow what payloads are like: all anchors are bit-equal, also of late members."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from coordinator.state.events import CompressedWeighed, PlanAdopted
from protocol.algorithm.compressed_weight import RECENT
from protocol.types import Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.scenario import MIXED, Play, contributions, return_after, swarm_spec
from tests.virtual.swarm import VirtualSwarm

ROUNDS = 11
MEMBERS = {**MIXED, "late": Role.REPLICA}


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "faults")


@pytest.fixture
def play(tmp_path: Path, plan: FaultPlan) -> Play:
    return Play(tmp_path, plan)


def final_tensors(swarm: VirtualSwarm, name: str) -> dict[str, Tensor]:
    task = swarm.nodes[name].task
    assert task is not None
    files = task.result().glob("stage-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal_bits(swarm: VirtualSwarm, *names: str) -> None:
    whole = final_tensors(swarm, "a")
    for name in names:
        found = final_tensors(swarm, name)
        assert found
        assert all(torch.equal(tensor, whole[key]) for key, tensor in found.items()), name
    trainers = [swarm.trainer(name) for name in ("a", *names)]
    assert len({trainer.outer.embedding_digest() for trainer in trainers}) == 1


def test_after_kills_and_late_joins_robust_weights_leave_all_anchors_equal(
    play: Play, plan: FaultPlan
) -> None:
    plan.fail_at("b", 0, 3, Moment.DECIDED, Action.KILL)
    plan.fail_at("q", None, 5, Moment.INNER_STEP, Action.KILL)
    spec = swarm_spec(MIXED, rounds=ROUNDS, **{"outer.weighting": "robust", "inner.microbatches": 1})

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*MIXED)
        await return_after(swarm, "b", 5)  # from its checkpoint, and by replay
        await return_after(swarm, "q", 5)  # follows the embedding
        await swarm.until_round(7)
        swarm.start("late")  # from a checkpoint of others
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "late")[-1] == ROUNDS
        assert any(len(each.entries) > 2 for each in swarm.decisions), "of two, weights stay as they are"
        assert_equal_bits(swarm, "b", "late", "p", "q")

    play(scenario, MEMBERS, spec)


def test_measured_weights_are_in_a_later_plan_and_a_late_member_follows_them(play: Play) -> None:
    spec = swarm_spec(
        MIXED,
        rounds=RECENT + 9,
        # Steps so large that bias shows within few rounds.
        **{"grouping.weights": "measured", "link.k": 1, "inner.learning_rate": 1e-2},
    )

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*MIXED)
        await swarm.until(
            lambda state: any("compressed replicas weigh" in each.reason for each in state.plans)
        )
        swarm.start("late")
        await swarm.until_over()
        swarm.assert_all_agree()
        changes = [event for event in swarm.events if isinstance(event, CompressedWeighed)]
        assert changes[0].round_number >= RECENT
        assert changes[0].weight < 1.0
        plans = [event.plan for event in swarm.events if isinstance(event, PlanAdopted)]
        lighter = next(plan for plan in plans if "compressed replicas weigh" in plan.reason)
        assert [each.weight for each in lighter.replicas] == [1.0, 1.0, changes[0].weight]
        pipeline = {swarm.peer("p"), swarm.peer("q")}
        weights = {
            entry.descriptor.weight
            for decision in swarm.decisions
            if decision.round_number >= lighter.from_round
            for entry in decision.entries
            if entry.descriptor.owner in pipeline
        }
        assert changes[0].weight in weights
        assert contributions(swarm, "late")[-1] == spec.rounds
        assert_equal_bits(swarm, "b", "late", "p", "q")

    play(scenario, MEMBERS, spec)
