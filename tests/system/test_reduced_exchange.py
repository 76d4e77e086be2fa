"""Swarms that reduce payloads in parts: all anchors agree, whoever fails in a round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence

import pytest
from hivemind.proto.averaging_pb2 import AveragingData

from coordinator.base.phrases import short
from node.exchange.hive.reduction.part_check import PartCheck
from node.exchange.hive.reduction.part_reducer import PartReducer
from protocol.pb.payload_pb2 import SignReply
from protocol.reduction.parts import Reducer
from protocol.types import Aborted, Committed, CommittedResult, Role
from tests.builders import decisions_in
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.network import current_machine
from tests.virtual.scenario import (
    MIXED,
    Play,
    contributions,
    cut_off,
    return_after,
    roll_back_and_resume,
)
from tests.virtual.swarm import VirtualSwarm

REDUCED = {"outer.exchange": "reduced"}


def results(swarm: VirtualSwarm) -> list[CommittedResult]:
    """Of the committed rounds."""
    found = [decision.result for decision in decisions_in(swarm.events, Committed)]
    assert None not in found
    return found


@pytest.mark.parametrize("options", [{}, {"outer.overlap": 1}, {"link.embedding_every": 1}])
def test_full_and_pipeline_replicas_commit_results_and_agree(play: Play, options: dict[str, int]) -> None:
    swarm = play.to_the_end(None, MIXED, rounds=4, **REDUCED, **options)
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    assert all(contributions(swarm, name) == swarm.rounds for name in ("a", "b"))
    assert {len(each.holders) for each in results(swarm)} == {3}
    assert {len(decision.entries) for decision in decisions_in(swarm.events, Committed)} == {3}


@pytest.mark.parametrize(
    "moment",
    [Moment.PROPOSED, Moment.MATCHED, Moment.GATHERED, Moment.DECIDED, Moment.APPLIED],
)
def test_a_reducer_that_is_killed_at_any_time_costs_a_round_at_most(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("b", 0, 2, moment, Action.KILL)
    swarm = play.to_the_end(lambda swarm: return_after(swarm, "b", 5), rounds=6, **REDUCED)
    assert set(swarm.committed(0)) >= {1, 3, 4, 5, 6}
    assert contributions(swarm, "b")[-1] == 6


async def a_cannot_call_b(swarm: VirtualSwarm) -> None:
    swarm.network.block_calls("a", "b")


async def they_cannot_call_each_other(swarm: VirtualSwarm) -> None:
    swarm.network.block_calls("a", "b")
    swarm.network.block_calls("b", "a")


async def separated(swarm: VirtualSwarm) -> None:
    """From the others, but not from the coordinator."""
    await swarm.until_round(3)
    for other in ("a", "c"):
        swarm.network.separate("b", other)
    await swarm.until_round(6)
    swarm.network.heal()


def test_a_replica_that_cannot_call_one_reducer_fetches_the_result_of_the_others(play: Play) -> None:
    swarm = play.to_the_end(a_cannot_call_b, rounds=3, **REDUCED)
    assert swarm.committed(0) == swarm.rounds
    assert contributions(swarm, "a") == swarm.rounds, "the parts that reach their reducers count"
    assert not any(swarm.peer("a") in each.holders for each in results(swarm))


def test_reducers_that_cannot_call_each_other_cost_one_round(play: Play) -> None:
    swarm = play.to_the_end(they_cannot_call_each_other, rounds=4, **REDUCED)
    assert swarm.committed(0) == [2, 3, 4]
    aborted = decisions_in(swarm.events, Aborted)
    assert {decision.round_number for decision in aborted} == {1}
    assert all("will reduce nothing" in decision.reason for decision in aborted)


def test_a_replica_that_is_cut_off_catches_up_by_results(play: Play) -> None:
    swarm = play.to_the_end(cut_off, rounds=9, **REDUCED)
    assert swarm.committed(0)[-3:] == [7, 8, 9]
    assert contributions(swarm, "b")[-1] == 9


def test_a_replica_that_is_separated_from_the_others_costs_one_round(play: Play) -> None:
    swarm = play.to_the_end(separated, rounds=6, **REDUCED)
    assert {4, 5, 6} <= set(swarm.committed(0))


def test_one_replica_alone_commits_its_own_results(play: Play) -> None:
    assert play.to_the_end(None, {"a": Role.REPLICA}, 3, **REDUCED).committed(0) == [1, 2, 3]


def test_after_a_rollback_all_reduce_again(play: Play) -> None:
    options = {**REDUCED, "recovery.checkpoint_every": 1}
    swarm = play.to_the_end(lambda swarm: roll_back_and_resume(swarm, 5, 2), MIXED, 7, **options)
    assert swarm.committed(0) == [1, 2, 3, 4, 6, 7]


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

    swarm = play.to_the_end(None, FIVE, 5, **REDUCED)
    assert swarm.committed(0) == swarm.rounds[1:]
    [reason] = aborted_for(swarm).values()
    assert short(swarm.peer("b")) in reason
    assert len(lies) == 2, "once for each stage"
    assert contributions(swarm, "b") == swarm.rounds[1:], "its own payloads count"


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

    swarm = play.to_the_end(None, FIVE, 5, **REDUCED)
    assert swarm.committed(0) == swarm.rounds[1:]
    [reason] = aborted_for(swarm).values()
    assert short(swarm.peer("b")) in reason
    assert reason.count("..") == 2
    assert len(refused) == 2, "once for each stage"
