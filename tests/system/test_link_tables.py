"""Pipelines whose links have tables: they are private, and a member that returns goes on with its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.core.model.link_table import LINK_TABLE
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.scenario import MIXED, PIPE, Play, return_after, swarm_spec
from tests.virtual.swarm import VirtualSwarm

ROUNDS, KILLED = 8, 5
SPEC = swarm_spec(MIXED, rounds=ROUNDS, **{"link.table": True})
H = SPEC.inner.steps


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "faults")


def steps_of_table(swarm: VirtualSwarm, names: set[str]) -> int:
    """How many steps the table behind the link of a pipeline of these members has been trained."""
    for trainer in map(swarm.trainer, names):
        if trainer.hosted.table is not None:
            assert trainer.hosted.table.values["rows"].any()
            moments = trainer.inner.state_dict()[LINK_TABLE]
            assert moments is not None
            return moments["steps"]
    raise AssertionError("no member is behind the link")


@pytest.mark.parametrize("killed", [*PIPE])
def test_a_killed_member_returns_with_its_table_and_all_anchors_agree(
    tmp_path: Path, plan: FaultPlan, killed: str
) -> None:
    plan.fail_at(killed, None, KILLED, Moment.INNER_STEP, Action.KILL)

    async def scenario(swarm: VirtualSwarm) -> int:
        swarm.start(*MIXED)
        await return_after(swarm, killed, 5)
        await swarm.until_over()
        swarm.assert_all_agree()
        return steps_of_table(swarm, {*PIPE})

    steps = Play(tmp_path, plan)(scenario, MIXED, SPEC)
    # More than it could have made since the kill: those before it are in the checkpoint.
    assert steps > (ROUNDS - KILLED + 1) * H


def test_a_spare_begins_with_an_empty_table_and_all_anchors_agree(tmp_path: Path, plan: FaultPlan) -> None:
    plan.fail_at("q", None, KILLED, Moment.INNER_STEP, Action.KILL)

    async def scenario(swarm: VirtualSwarm) -> int:
        swarm.start(*MIXED)
        await swarm.until_round(2)
        swarm.start("spare")
        await swarm.until_fired("q")
        await swarm.until_over()
        swarm.assert_all_agree("a", "b", "p", "spare")
        return steps_of_table(swarm, {"p", "spare"})

    steps = Play(tmp_path, plan)(scenario, {**MIXED, "spare": MIXED["q"]}, SPEC)
    assert steps > 0
