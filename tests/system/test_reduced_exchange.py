"""Swarms that reduce payloads in parts: all anchors agree, whoever fails in a round."""

from __future__ import annotations

import pytest

from coordinator.state.events import RoundAborted, RoundCommitted
from protocol.types import Decision, Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.rollback import attested, resume, roll_back
from tests.virtual.scenario import FULL, MIXED, Play, contributions, return_after, swarm_spec
from tests.virtual.swarm import VirtualSwarm

REDUCED = {"outer.exchange": "reduced"}
ONE = {"a": Role.REPLICA}


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


def test_a_replica_that_cannot_call_one_reducer_fetches_the_result_of_the_others(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.network.block_calls("a", "b")
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == [1, 2, 3]
        assert contributions(swarm, "a") == [1, 2, 3], "the parts that reach their reducers count"
        for decision in decisions(swarm):
            assert decision.result is not None
            assert swarm.peer("a") not in decision.result.holders

    play(scenario, spec=swarm_spec(FULL, rounds=3, **REDUCED))


def test_reducers_that_cannot_call_each_other_cost_one_round(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.network.block_calls("a", "b")
        swarm.network.block_calls("b", "a")
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == list(range(2, 7))
        aborted = [event.decision for event in swarm.events if isinstance(event, RoundAborted)]
        assert {decision.round_number for decision in aborted} == {1}
        assert all("will reduce nothing" in decision.reason for decision in aborted)

    play(scenario, spec=swarm_spec(FULL, rounds=6, **REDUCED))


def test_a_replica_that_is_cut_off_catches_up_by_results(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        swarm.network.isolate("b")
        await swarm.until_round(6)
        swarm.network.heal()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0)[-3:] == [7, 8, 9]
        assert contributions(swarm, "b")[-1] == 9

    play(scenario, spec=swarm_spec(FULL, rounds=9, **REDUCED))


def test_one_replica_alone_commits_its_own_results(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == [1, 2, 3]

    play(scenario, ONE, swarm_spec(ONE, rounds=3, **REDUCED))


def test_after_a_rollback_all_reduce_again(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(5)
        number = await roll_back(swarm, 2)
        await swarm.until(attested(number, 3), "the rollback")
        await resume(swarm)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == [1, 2, 3, 4, 6, 7]

    options = {**REDUCED, "recovery.checkpoint_every": 1}
    play(scenario, MIXED, swarm_spec(MIXED, rounds=7, **options))
