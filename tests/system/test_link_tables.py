"""Pipelines whose links have tables: they are private, and a member that returns goes on with its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from node.core.model.link_table import LINK_TABLE
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.scenario import MIXED, PIPE, Play, return_after
from tests.virtual.swarm import VirtualSwarm

ROUNDS, KILLED = 8, 5
TABLES = {"link.table": True}


def steps_of_table(swarm: VirtualSwarm, names: Iterable[str]) -> int:
    """How many steps the table behind the link of a pipeline of these members has been trained."""
    for trainer in map(swarm.trainer, names):
        if trainer.hosted.table is not None:
            assert trainer.hosted.table.values["rows"].any()
            moments = trainer.inner.state_dict()[LINK_TABLE]
            assert moments is not None
            return moments["steps"]
    raise AssertionError("no member is behind the link")


@pytest.mark.parametrize("killed", ["p", pytest.param("q", marks=pytest.mark.slow)])
def test_a_killed_member_returns_with_its_table_and_all_anchors_agree(
    play: Play, plan: FaultPlan, killed: str
) -> None:
    plan.fail_at(killed, None, KILLED, Moment.INNER_STEP, Action.KILL)
    swarm = play.to_the_end(lambda swarm: return_after(swarm, killed, 5), MIXED, ROUNDS, **TABLES)
    # More than it could have made since the kill: those before it are in the checkpoint.
    assert steps_of_table(swarm, PIPE) > (ROUNDS - KILLED + 1) * swarm.spec.inner.steps


def test_a_spare_begins_with_an_empty_table_and_all_anchors_agree(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, KILLED, Moment.INNER_STEP, Action.KILL)

    async def replaced(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        swarm.start("spare")
        await swarm.until_fired("q")

    staying, later = ("a", "b", "p", "spare"), {"spare": MIXED["q"]}
    swarm = play.to_the_end(replaced, MIXED, ROUNDS, later, staying, **TABLES)
    assert steps_of_table(swarm, ("p", "spare")) > 0
