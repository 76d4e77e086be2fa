"""A run with pipelines and Muon: what layers write stays in what links carry, equal on all members."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from node.experiment.in_process_swarm import LocalSwarm
from protocol.math.output_subspace import OUTPUTS
from protocol.math.subspace import orthonormal_basis
from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.running_replica import spec_of
from tests.virtual.scenario import Play, attested, contributions, resume, return_after, roll_back
from tests.virtual.swarm import VirtualSwarm

PIPELINES = {"p": Role.STAGE, "q": Role.STAGE, "r": Role.STAGE, "s": Role.STAGE}
MUON = {"inner.optimizer": "muon", "link.k": 8, "outer.top_k": 128}


def outside(spec: RunSpec, weight: Tensor) -> float:
    """The share of a matrix that links drop."""
    u_dk = orthonormal_basis(spec.model.width, spec.seed)[:, : spec.link.k]
    return float((weight - u_dk @ (u_dk.T @ weight)).norm() / weight.norm())


@pytest.mark.parametrize("overlap", [0, 1])
def test_kills_a_rollback_and_late_joiners_leave_all_anchors_equal_and_in_the_subspace(
    play: Play, plan: FaultPlan, overlap: int
) -> None:
    plan.fail_at("q", 0, 2, Moment.DECIDED, Action.KILL)
    plan.fail_at("r", None, 3, Moment.INNER_STEP, Action.KILL)

    async def disturbed(swarm: VirtualSwarm) -> None:
        await return_after(swarm, "q", 5)  # from its checkpoint, and by replay
        await return_after(swarm, "r", 5)
        await swarm.until_round(5)
        number = await roll_back(swarm, 2)
        await swarm.until(attested(number, 2), "the rollback")
        await resume(swarm)
        swarm.start("late")  # a full replica, from a checkpoint of others
        await asyncio.sleep(5)

    swarm = play.to_the_end(
        disturbed,
        PIPELINES,
        rounds=9,
        later={"late": Role.REPLICA},
        **{"recovery.checkpoint_every": 1, "outer.overlap": overlap, **MUON},
    )
    assert not swarm.diverged()
    assert all(contributions(swarm, name)[-1] == 9 for name in (*PIPELINES, "late"))
    hosts = [swarm.trainer(name) for name in swarm.nodes if 0 in swarm.trainer(name).stages]
    assert len(hosts) == 3
    for trainer in hosts:
        written = {name: each for name, each in trainer.outer[0].anchor.items() if name.endswith(OUTPUTS)}
        assert written
        assert all(outside(trainer.spec, each) < 1e-5 for each in written.values())


def small(**overrides: Any) -> LocalSwarm:
    torch.set_num_threads(1)
    shape = {"swarm.replicas": 0, "swarm.pipelines": 2, "swarm.stages": 2, "inner.microbatches": 1}
    return LocalSwarm(spec_of(**{**MUON, **shape, "inner.warmup_steps": 2, **overrides}))


@pytest.mark.parametrize("full", [0, 1])
def test_replicas_write_only_what_links_carry_before_their_last_stage(full: int) -> None:
    swarm = small(rounds=1, **{"swarm.replicas": full})
    assert len(swarm.replicas) == 2 + full
    swarm.train()
    for replica in swarm.replicas:
        for stage in range(2):
            for name, each in replica.host_of(stage).parameters(stage).items():
                if name.endswith(OUTPUTS):
                    assert (outside(swarm.spec, each.detach()) < 1e-5) == (stage == 0), name


def test_the_plain_model_is_as_good_as_through_its_links() -> None:
    swarm = small(rounds=3, **{"link.k": 2, "inner.learning_rate": 0.05})
    for _ in range(3):
        swarm.train_round()
    replica = swarm.replicas[0]
    through_links = replica.validate()
    replica.connect([0])
    assert replica.validate() == pytest.approx(through_links, abs=1e-4)
