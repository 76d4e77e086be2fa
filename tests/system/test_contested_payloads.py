"""Replicas that report only their own payload as held, in a swarm of production nodes on a virtual clock."""

from __future__ import annotations

import pytest

from coordinator.run.state.events import PayloadArbitrated, PayloadsContested
from coordinator.run.state.state import State
from protocol.types import Committed, Finding, Role
from tests.builders import decisions_in
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.coordinator import COORDINATOR
from tests.virtual.scenario import TWO, Play, contributions
from tests.virtual.swarm import VirtualSwarm

ROUNDS = 4


def lie(plan: FaultPlan, *names: str) -> None:
    """These nodes report only their own payloads, in every round."""
    for name in names:
        plan.fail_at(name, None, None, Moment.GATHERED, Action.DENY, times=1000)


@pytest.mark.parametrize("names", ["ab", "abcd", pytest.param("abcdef", marks=pytest.mark.slow)])
def test_half_of_the_replicas_that_deny_all_payloads_keep_no_honest_payload_out(
    play: Play, plan: FaultPlan, names: str
) -> None:
    liars = names[len(names) // 2 :]
    lie(plan, *liars)
    swarm = play.to_the_end(None, dict.fromkeys(names, Role.REPLICA), ROUNDS)
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    assert all(contributions(swarm, name) == swarm.rounds for name in names if name not in liars)
    assert {event.verdict.finding for event in swarm.happened(PayloadArbitrated)} == {Finding.HELD}
    assert not swarm.state.strikes


def test_members_that_the_owner_cannot_reach_get_the_payload_from_the_arbiter(play: Play) -> None:
    """No lie: the two replicas cannot reach each other, and both reach the coordinator."""

    async def apart(swarm: VirtualSwarm) -> None:
        swarm.network.block_calls("a", "b")
        swarm.network.block_calls("b", "a")

    swarm = play.to_the_end(apart, TWO, ROUNDS)
    assert contributions(swarm, "a") == contributions(swarm, "b") == swarm.rounds
    entries = [entry for each in decisions_in(swarm.events, Committed) for entry in each.entries]
    assert sum(COORDINATOR.peer in entry.holders for entry in entries) == 2 * 2 * ROUNDS
    assert not swarm.state.strikes


def test_a_coordinator_that_dies_in_an_arbitration_goes_on_with_it(play: Play, plan: FaultPlan) -> None:
    lie(plan, "b")

    async def killed(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        await swarm.until(is_contested, "a contest")
        swarm.coordinator.kill()
        await swarm.coordinator.start()

    swarm = play.to_the_end(killed, TWO, ROUNDS)
    assert contributions(swarm, "a") == contributions(swarm, "b") == swarm.rounds


def test_an_arbiter_out_of_reach_leaves_the_decision_to_the_reports(play: Play, plan: FaultPlan) -> None:
    lie(plan, "b")

    async def blocked(swarm: VirtualSwarm) -> None:
        swarm.network.block_calls("coordinator", "a")

    swarm = play.to_the_end(blocked, TWO, ROUNDS)
    assert contributions(swarm, "b") == swarm.rounds
    assert contributions(swarm, "a") == []
    asked = swarm.happened(PayloadsContested)
    assert len(asked) == 2, "the arbiter waits once for each stage, then not again for some rounds"
    assert not swarm.state.strikes


def is_contested(state: State) -> bool:
    round_state = state.round_of(0, state.current_round)
    return round_state.contest is not None and bool(round_state.contest.open_owners)
