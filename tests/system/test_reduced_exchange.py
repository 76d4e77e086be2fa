"""Swarms that reduce payloads in parts: all anchors agree, whoever fails in a round."""

from __future__ import annotations

import pytest

from coordinator.state.events import RoundCommitted
from protocol.types import Decision
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.scenario import FULL, MIXED, Play, contributions, return_after, swarm_spec
from tests.virtual.swarm import VirtualSwarm

REDUCED = {"outer.exchange": "reduced"}


def decisions(swarm: VirtualSwarm) -> list[Decision]:
    return [event.decision for event in swarm.events if isinstance(event, RoundCommitted)]


@pytest.mark.parametrize("overlap", [0, 1])
def test_full_and_pipeline_replicas_commit_results_and_agree(play: Play, overlap: int) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4]
        assert all(contributions(swarm, name) == [1, 2, 3, 4] for name in ("a", "b"))
        for decision in decisions(swarm):
            assert decision.result is not None
            assert len(decision.entries) == 3
            assert len(decision.result.holders) == 3

    play(scenario, MIXED, swarm_spec(MIXED, rounds=4, **REDUCED, **{"outer.overlap": overlap}))


@pytest.mark.parametrize(
    "moment",
    [Moment.PROPOSED, Moment.MATCHED, Moment.GATHERED, Moment.DECIDED, Moment.APPLIED],
)
def test_a_reducer_that_is_killed_at_any_time_costs_a_round_at_most(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("b", 0, 3, moment, Action.KILL)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await return_after(swarm, "b", 5)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert set(swarm.committed(0)) >= {1, 2, 4, 5, 6, 7, 8}
        assert contributions(swarm, "b")[-1] == 8

    play(scenario, spec=swarm_spec(FULL, rounds=8, **REDUCED))
