"""Replicas that report only their own payload as held, in a swarm of production nodes on a virtual clock."""

from __future__ import annotations

import pytest

from coordinator.run.state.events import PayloadArbitrated, PayloadsContested
from coordinator.run.state.state import State
from protocol.types import Finding, Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.coordinator import COORDINATOR
from tests.virtual.scenario import TWO, Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

ROUNDS = 4
EVERY_ROUND = list(range(1, ROUNDS + 1))


def lie(plan: FaultPlan, *names: str) -> None:
    """These nodes report only their own payloads, in every round."""
    for name in names:
        plan.fail_at(name, None, None, Moment.GATHERED, Action.DENY, times=1000)


@pytest.mark.parametrize("names", ["ab", "abcd", "abcdef"])
def test_half_of_the_replicas_that_deny_all_payloads_keep_no_honest_payload_out(
    play: Play, plan: FaultPlan, names: str
) -> None:
    members = dict.fromkeys(names, Role.REPLICA)
    liars = names[len(names) // 2 :]
    lie(plan, *liars)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == EVERY_ROUND
        assert all(contributions(swarm, name) == EVERY_ROUND for name in names if name not in liars)
        verdicts = [event.verdict for event in swarm.events if isinstance(event, PayloadArbitrated)]
        assert {verdict.finding for verdict in verdicts} == {Finding.HELD}
        assert not swarm.state.strikes

    play(scenario, members, swarm_spec(members, rounds=ROUNDS))


def test_contested_payloads_are_dropped_when_no_peer_needs_them_any_more(play: Play, plan: FaultPlan) -> None:
    lie(plan, "b")

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(2)
        kept = swarm.folder / "coordinator" / "contested" / "stage-00"
        assert list((kept / "round-000001").iterdir())
        await swarm.until_round(6)
        assert not (kept / "round-000001").exists()
        await swarm.until_over()

    play(scenario, TWO, swarm_spec(TWO, rounds=6))


def test_members_that_the_owner_cannot_reach_get_the_payload_from_the_arbiter(play: Play) -> None:
    """No lie: the two replicas cannot reach each other, and both reach the coordinator."""

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.network.block_calls("a", "b")
        swarm.network.block_calls("b", "a")
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "a") == contributions(swarm, "b") == EVERY_ROUND
        served = [
            entry for each in swarm.decisions for entry in each.entries if COORDINATOR.peer in entry.holders
        ]
        assert len(served) == 2 * 2 * ROUNDS
        assert not swarm.state.strikes

    play(scenario, TWO, swarm_spec(TWO, rounds=ROUNDS))


def test_a_coordinator_that_dies_in_an_arbitration_goes_on_with_it(play: Play, plan: FaultPlan) -> None:
    lie(plan, "b")

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await swarm.until(_is_contested, "a contest")
        swarm.coordinator.kill()
        await swarm.coordinator.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "a") == contributions(swarm, "b") == EVERY_ROUND

    play(scenario, TWO, swarm_spec(TWO, rounds=ROUNDS))


def test_an_arbiter_out_of_reach_leaves_the_decision_to_the_reports(play: Play, plan: FaultPlan) -> None:
    lie(plan, "b")

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.network.block_calls("coordinator", "a")
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b") == EVERY_ROUND
        assert contributions(swarm, "a") == []
        asked = [event for event in swarm.events if isinstance(event, PayloadsContested)]
        assert len(asked) == 2, "the arbiter waits once for each stage, then not again for some rounds"
        assert not swarm.state.strikes

    play(scenario, TWO, swarm_spec(TWO, rounds=ROUNDS))


def _is_contested(state: State) -> bool:
    round_state = state.round_of(0, state.current_round)
    return round_state.contest is not None and bool(round_state.contest.open_owners)
