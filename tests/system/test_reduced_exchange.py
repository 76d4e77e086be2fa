"""Swarms that reduce payloads in parts: all anchors agree, whoever fails in a round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence

import pytest
from hivemind.proto.averaging_pb2 import AveragingData

from coordinator.run.state.text import short
from node.exchange.hive.reduction.part_check import PartCheck
from node.exchange.hive.reduction.part_reducer import PartReducer
from protocol.pb.payload_pb2 import SignReply
from protocol.reduction.parts import Reducer
from protocol.types import Aborted, Committed, Decision, Role
from tests.builders import decisions_in
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.network import current_machine
from tests.virtual.rollback import roll_back_and_end
from tests.virtual.scenario import FULL, MIXED, Play, contributions, cut_off, return_after, swarm_spec
from tests.virtual.swarm import VirtualSwarm

REDUCED = {"outer.exchange": "reduced"}
ONE = {"a": Role.REPLICA}


def decisions(swarm: VirtualSwarm) -> list[Decision]:
    return decisions_in(swarm.events, Committed)


@pytest.mark.parametrize("options", [{}, {"outer.overlap": 1}, {"link.embedding_every": 1}])
def test_full_and_pipeline_replicas_commit_results_and_agree(play: Play, options: dict[str, int]) -> None:
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

    play(scenario, MIXED, swarm_spec(MIXED, rounds=4, **REDUCED, **options))


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
        aborted = decisions_in(swarm.events, Aborted)
        assert {decision.round_number for decision in aborted} == {1}
        assert all("will reduce nothing" in decision.reason for decision in aborted)

    play(scenario, spec=swarm_spec(FULL, rounds=6, **REDUCED))


def test_a_replica_that_is_cut_off_catches_up_by_results(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        await cut_off(swarm, "b")
        assert swarm.committed(0)[-3:] == [7, 8, 9]
        assert contributions(swarm, "b")[-1] == 9

    play(scenario, spec=swarm_spec(FULL, rounds=9, **REDUCED))


def test_a_replica_that_is_separated_from_the_others_costs_one_round(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        for other in ("a", "c"):
            swarm.network.separate("b", other)
        await swarm.until_round(8)
        swarm.network.heal()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert {4, 5, 6, 7, 8} <= set(swarm.committed(0))

    play(scenario, spec=swarm_spec(FULL, rounds=8, **REDUCED))


def test_one_replica_alone_commits_its_own_results(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == [1, 2, 3]

    play(scenario, ONE, swarm_spec(ONE, rounds=3, **REDUCED))


def test_after_a_rollback_all_reduce_again(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        await roll_back_and_end(swarm, at=5, restore_round=2)
        assert swarm.committed(0) == [1, 2, 3, 4, 6, 7]

    options = {**REDUCED, "recovery.checkpoint_every": 1}
    play(scenario, MIXED, swarm_spec(MIXED, rounds=7, **options))


FIVE = dict.fromkeys("abcde", Role.REPLICA)


class FalseReducer:
    """Sums as if the first member had ten times its weight."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def reduce(self, parts: Sequence[bytes], weights: Sequence[float]) -> bytes:
        return self._reducer.reduce(parts, [10 * weights[0], *weights[1:]])


def aborted_for(swarm: VirtualSwarm) -> dict[int, str]:
    """The reason of each aborted round of stage 0."""
    found = decisions_in(swarm.events, Aborted)
    return {each.round_number: each.reason for each in found if each.stage == 0}


def test_a_reducer_with_false_sums_is_found_by_its_checker_and_reduces_no_more(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lies = PartReducer.begin, []

    def begin(self: PartReducer, reducers: Sequence[Reducer], senders: Collection[int] | None = None) -> None:
        if current_machine() == "b" and reducers:
            lies.append(reducers)
            reducers = [FalseReducer(each) for each in reducers]  # type: ignore[misc]
        honest(self, reducers, senders)

    monkeypatch.setattr(PartReducer, "begin", begin)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == list(range(2, 8))
        [reason] = aborted_for(swarm).values()
        assert short(swarm.peer("b")) in reason
        assert len(lies) == 2, "once for each stage"
        assert contributions(swarm, "b") == list(range(2, 8)), "its own payloads count"

    play(scenario, FIVE, swarm_spec(FIVE, rounds=7, **REDUCED))


def test_a_checker_that_signs_nothing_costs_one_round_and_neither_of_the_two_reduces(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, refused = PartCheck.sign, []

    async def sign(self: PartCheck, stream: AsyncIterator[AveragingData]) -> SignReply:
        reply = await honest(self, stream)
        if current_machine() == "b":
            refused.append(self.checked)
            return SignReply(refusal="a lie")
        return reply

    monkeypatch.setattr(PartCheck, "sign", sign)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == list(range(2, 6))
        [reason] = aborted_for(swarm).values()
        assert short(swarm.peer("b")) in reason
        assert reason.count("..") == 2
        assert len(refused) == 2, "once for each stage"

    play(scenario, FIVE, swarm_spec(FIVE, rounds=5, **REDUCED))
