"""A member of a pipeline dies: within the round a spare takes its seat, and the others keep their steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.run.state.commands import ChangeRun, Leave
from coordinator.run.state.events import PlanAdopted
from node.core.train.recovery import Recovery
from node.net import link_server
from node.net.link import LinkMember
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb.hetnode_pb2 import Hello
from protocol.spec.run import RunSpec
from protocol.types import Lifecycle, Plan, Replica, Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.overlap import LOSSLESS, Records, assert_balanced
from tests.virtual.network import current_machine
from tests.virtual.scenario import (
    MIXED,
    PIPE,
    QUICK,
    SPARSE,
    Play,
    assert_each_sample_counts_once,
    contributions,
    owners,
    shares,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm

ROUND, STEP, STEPS = 2, 2, 5
SPARES = {"s": Role.STAGE, "t": Role.STAGE}
SECONDS = 10.0
"""Of an inner step: what is left of a phase is longer than the wait for a spare."""


def spec_of(rounds: int = 3, members: Mapping[str, Role] = MIXED, **settings: Any) -> RunSpec:
    """A pipeline of two homes, and two spares, which follow the rounds of its stages."""
    shape = {"swarm.pipelines": 1, "grouping.spares": 2, "inner.steps": STEPS, "inner.microbatches": 4}
    return swarm_spec(members, rounds, **{**shape, "recovery.checkpoint_every": 1, **QUICK, **settings})


async def start_spares(swarm: VirtualSwarm) -> None:
    await swarm.until_round(1)  # before that, any two of the four homes would make the pipeline
    swarm.start(*SPARES)


async def return_in(swarm: VirtualSwarm, number: int, dead: str = "q") -> None:
    """Wait for a death, and start the home again in round `number`."""
    await swarm.until_fired(dead)
    await swarm.until_round(number)
    swarm.start(dead)


def repairs(swarm: VirtualSwarm) -> list[Plan]:
    return [event.plan for event in swarm.happened(PlanAdopted) if event.plan.repairs]


def seats(swarm: VirtualSwarm, repair: Plan) -> list[str]:
    """The members of the pipeline under a plan, in order of position."""
    names = {swarm.peer(name): name for name in swarm.nodes}
    (replica,) = (each for each in repair.replicas if len(each.members) == 2)
    return [names[member.peer] for member in replica.members]


def chains_of(plan: Plan) -> list[Replica]:
    return [each for each in plan.replicas if len(each.members) > 1]


def resumed_at(repair: Plan) -> list[int]:
    return [each.resumes_at for each in repair.replicas if len(each.members) == 2]


@pytest.mark.parametrize(
    ("dead", "moment", "settings"),
    [
        ("p", Moment.FORWARD, {}),
        ("q", Moment.BACKWARD, {}),
        ("q", Moment.NORM, {"outer.overlap": 1}),
    ],
)
def test_a_spare_takes_the_seat_of_a_dead_member_within_the_round(
    play: Play, plan: FaultPlan, records: Records, dead: str, moment: Moment, settings: Mapping[str, Any]
) -> None:
    plan.fail_at(dead, None, ROUND, moment, Action.KILL, step=STEP)
    spec = spec_of(**{**SPARSE, **LOSSLESS, **settings})

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await return_in(swarm, ROUND + 1, dead)

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec, step_seconds=SECONDS)
    (repair,) = repairs(swarm)
    assert (repair.from_round, resumed_at(repair)) == (ROUND, [STEP])
    chain = seats(swarm, repair)
    (survivor,), (spare,) = {*chain} & PIPE.keys(), {*chain} & SPARES.keys()
    assert survivor != dead
    assert shares(swarm, survivor, ROUND) == {chain.index(survivor): 1.0}
    # What it has learned in a part of the round is in its next payload.
    assert shares(swarm, spare, ROUND) == {}
    assert shares(swarm, spare, ROUND + 1) == {chain.index(spare): 1.0}
    assert shares(swarm, dead, ROUND) == {}
    # The others notice nothing of it.
    assert all(owners(swarm, stage, ROUND) >= {"a", "b"} for stage in (0, 1))
    assert contributions(swarm, "a") == contributions(swarm, "b") == swarm.rounds
    assert_each_sample_counts_once(swarm)
    assert_balanced(swarm, records, survivor, spare, "a", "b")


def test_two_deaths_in_a_round_are_repaired_one_after_the_other(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await swarm.until(lambda _: bool(repairs(swarm)), "the first repair")
        first = seats(swarm, repairs(swarm)[0])
        await asyncio.sleep(0.1)  # the spare opens its link, or has just opened it
        (survivor,) = {*first} & PIPE.keys()
        swarm.kill(survivor)
        await swarm.until_round(ROUND + 1)
        swarm.start("p", "q")

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec_of(4), step_seconds=SECONDS)
    first, second = repairs(swarm)
    assert (first.from_round, second.from_round, second.repairs) == (ROUND, ROUND, first.repairs)
    assert {*seats(swarm, second)} == SPARES.keys()
    # Nothing of the first two members is left. What the others have learned since is in the next round.
    assert [*map(shares, [swarm] * 2, SPARES, [ROUND] * 2)] == [{}, {}]
    assert all([*shares(swarm, spare, ROUND + 1).values()] == [1.0] for spare in SPARES)
    assert_each_sample_counts_once(swarm)
    assert contributions(swarm, "a") == swarm.rounds


def test_a_spare_that_is_lost_before_it_has_its_link_is_replaced_too(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)
    spares = {**SPARES, "u": Role.STAGE, "v": Role.STAGE}

    async def lost(swarm: VirtualSwarm) -> None:
        await swarm.until_round(1)
        swarm.start(*spares)
        await swarm.until(lambda _: bool(repairs(swarm)), "the first repair")
        (first,) = {*seats(swarm, repairs(swarm)[0])} & spares.keys()
        swarm.kill(first)
        await swarm.until_round(ROUND + 1)
        swarm.start("q", first)

    spec = spec_of(4, **{"grouping.spares": 4})
    swarm = play.to_the_end(lost, MIXED, later=spares, spec=spec, step_seconds=SECONDS)
    first, second = repairs(swarm)
    assert resumed_at(first) == resumed_at(second) == [STEP]
    assert len({*seats(swarm, first), *seats(swarm, second)}) == 3
    (survivor,) = {*seats(swarm, second)} & PIPE.keys()
    assert [*shares(swarm, survivor, ROUND).values()] == [1.0]
    assert_each_sample_counts_once(swarm)


def test_a_survivor_offers_its_steps_where_the_spare_is_lost_and_no_other_comes(
    play: Play, plan: FaultPlan
) -> None:
    """The others end the round while the survivor waits for its links to the spare."""
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)
    dead = list[str]()

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await swarm.until(lambda _: bool(repairs(swarm)), "the first repair")
        dead.extend({*seats(swarm, repairs(swarm)[0])} & SPARES.keys())
        swarm.kill(*dead)
        await swarm.until_round(ROUND + 1)
        swarm.start("q", *dead)

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec_of(), step_seconds=SECONDS)
    assert len(repairs(swarm)) == len(dead) == 1
    assert [*shares(swarm, "p", ROUND).values()] == [STEP / STEPS]
    assert_each_sample_counts_once(swarm)


def test_a_member_that_is_asked_to_leave_goes_on_with_the_others_to_the_end_of_the_round(play: Play) -> None:
    async def broken(swarm: VirtualSwarm) -> None:
        await swarm.until_round(ROUND)
        await asyncio.sleep(1.5 * SECONDS)
        swarm.drain("q")
        swarm.network.reset("p", "q")

    ending = ("a", "b")
    spec = spec_of(**{"inner.steps": 8})
    swarm = play.to_the_end(broken, MIXED, spec=spec, step_seconds=SECONDS, ending=ending)
    (repair,) = repairs(swarm)
    assert {*seats(swarm, repair)} == PIPE.keys()
    assert [*shares(swarm, "p", ROUND).values(), *shares(swarm, "q", ROUND).values()] == [1.0, 1.0]
    assert swarm.state.peers[swarm.peer("q")].lifecycle is Lifecycle.GONE
    assert_each_sample_counts_once(swarm)


@pytest.mark.parametrize("dead", ["p", "q"])
def test_another_spare_takes_the_seat_where_the_first_does_not_reach_the_survivor(
    play: Play, plan: FaultPlan, dead: str
) -> None:
    plan.fail_at(dead, None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)
    spares = dict.fromkeys("stuv", Role.STAGE)
    (survivor,) = PIPE.keys() - {dead}

    async def lost(swarm: VirtualSwarm) -> None:
        await swarm.until_round(1)
        swarm.start(*spares)
        await swarm.until_round(ROUND)
        reserved, seats_now = swarm.state.reservations, swarm.state.assignments[swarm.state.epoch]
        lost_stages = seats_now[swarm.peer(dead)].member.stages
        able = [each for each in spares if reserved[swarm.peer(each)].stages == lost_stages]
        swarm.network.separate(min(able, key=swarm.peer), survivor)
        await swarm.until_fired(dead)
        await swarm.until_round(ROUND + 1)
        swarm.network.heal()
        swarm.start(dead)

    spec = spec_of(**{"grouping.spares": 4, "inner.steps": 8})
    swarm = play.to_the_end(lost, MIXED, later=spares, spec=spec, step_seconds=SECONDS)
    first, second = (each for each in repairs(swarm) if each.from_round == ROUND)
    assert {*seats(swarm, first)} & {*seats(swarm, second)} == {survivor}
    assert [*shares(swarm, survivor, ROUND).values()] == [1.0]
    assert_each_sample_counts_once(swarm)


@pytest.mark.parametrize("code", [ErrorCode.SPEC_MISMATCH, ErrorCode.CERTIFICATE_REFUSED])
def test_a_spare_that_refuses_the_link_ends_no_node_and_costs_no_steps(
    play: Play, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch, code: ErrorCode
) -> None:
    """The spare answers as if it took part in another run, as a liar may."""
    plan.fail_at("p", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)
    check, asked = link_server.check_hello, list[str]()

    def refuse(hello: Hello, expected: LinkMember) -> None:
        if current_machine() in SPARES:
            asked.append(current_machine())
            raise HetnodeError(code, "This is another run.", "None.")
        check(hello, expected)

    monkeypatch.setattr(link_server, "check_hello", refuse)

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await return_in(swarm, ROUND + 1, "p")

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec_of(), step_seconds=SECONDS, ending="ab")
    assert asked
    assert not swarm.nodes["q"].errors
    assert [*shares(swarm, "q", ROUND).values()] == [STEP / STEPS]


def test_a_repair_of_another_chain_leaves_links_that_are_being_opened_alone(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New settings hold from a round on, so all links open anew. A late member knows a newer plan."""
    members = {"a": Role.REPLICA, **dict.fromkeys("pquv", Role.STAGE)}
    load, late = Recovery.load_at_start, list[str]()

    async def load_late(self: Recovery) -> None:
        await load(self)
        if current_machine() in late:
            await asyncio.sleep(20.0)

    monkeypatch.setattr(Recovery, "load_at_start", load_late)
    other = list[str]()

    async def changed(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await swarm.until_round(ROUND)
        names = {swarm.peer(name): name for name in swarm.nodes}
        one, *rest = (
            [names[each.peer] for each in chain.members] for chain in chains_of(swarm.state.plans[-1])
        )
        other.extend(rest[0])
        late.append(other[1])
        await swarm.coordinator.command_loop.execute(
            ChangeRun(("inner.learning_rate=0.0005",), ROUND + 1, "")
        )
        await swarm.until(lambda state: (0, ROUND) in state.decisions, "a decision")
        swarm.kill(one[1])
        await swarm.until_round(ROUND + 2)
        swarm.start(one[1])

    settings = {"swarm.pipelines": 2, "recovery.checkpoint_every": 3, "timing.lost_after": 15.0}
    spec = spec_of(members=members, **settings)
    swarm = play.to_the_end(changed, members, later=SPARES, spec=spec, step_seconds=SECONDS)
    assert repairs(swarm)
    measured = swarm.measured()
    assert [measured[name, ROUND + 1]["steps"] for name in other] == [STEPS, STEPS]


@pytest.mark.parametrize("seconds", [0.002, 0.02])
def test_the_answer_to_a_retreat_may_be_lost_with_the_coordinator(
    play: Play, plan: FaultPlan, seconds: float
) -> None:
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await swarm.until_fired("q")
        # The other member counts as gone when the retreat arrives.
        await swarm.coordinator.command_loop.execute(Leave(swarm.peer("q"), "interrupted"))
        await swarm.until(lambda _: bool(repairs(swarm)), "the repair")
        await asyncio.sleep(seconds)  # the answer is under way
        swarm.coordinator.kill()
        await asyncio.sleep(1.0)
        await swarm.coordinator.start()
        await swarm.until_round(ROUND + 1)
        swarm.start("q")

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec_of(), step_seconds=SECONDS)
    assert [*shares(swarm, "p", ROUND).values()] == [1.0]
    assert_each_sample_counts_once(swarm)


@pytest.mark.parametrize("dead", ["p", "q"])
def test_a_survivor_that_computes_its_last_step_is_waited_for(play: Play, plan: FaultPlan, dead: str) -> None:
    """The survivor does not know of the death, and the others have offered before it can."""
    plan.fail_at(dead, None, ROUND, Moment.APPLY, Action.KILL, step=STEPS - 1)
    (survivor,) = PIPE.keys() - {dead}

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await return_in(swarm, ROUND + 1, dead)

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec_of(4), step_seconds=SECONDS)
    assert [*shares(swarm, survivor, ROUND).values()] == [1.0]


def test_a_line_that_breaks_twice_costs_two_steps_and_no_member(play: Play) -> None:
    async def broken(swarm: VirtualSwarm) -> None:
        await swarm.until_round(ROUND)
        for count in (1, 2):
            await asyncio.sleep(1.5 * SECONDS)
            swarm.network.reset("p", "q")
            await swarm.until(lambda _, count=count: len(repairs(swarm)) == count, "a repair")

    spec = spec_of(**{"inner.steps": 8})
    swarm = play.to_the_end(broken, MIXED, spec=spec, step_seconds=SECONDS)
    first, second = repairs(swarm)
    assert {*seats(swarm, first)} == {*seats(swarm, second)} == PIPE.keys()
    assert [*shares(swarm, "p", ROUND).values(), *shares(swarm, "q", ROUND).values()] == [1.0, 1.0]
    # Bytes of links that have ended are measured, too.
    measured = swarm.measured()
    sent = [measured["q", number]["link_bytes_sent"] for number in (ROUND, ROUND + 1)]
    assert sent[0] > 0.8 * sent[1], sent
    assert contributions(swarm, "a") == swarm.rounds
    assert_each_sample_counts_once(swarm)


def test_a_member_that_stood_still_returns_as_a_spare(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.STOP, step=STEP, seconds=30.0)

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await swarm.until_fired("q")

    spec = spec_of(**{"timing.link": 3.0, "grouping.spares": 1})
    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec, step_seconds=SECONDS)
    (repair,) = repairs(swarm)
    assert "q" not in seats(swarm, repair)
    assert [*shares(swarm, "p", ROUND).values()] == [1.0]
    assert not swarm.nodes["q"].errors
    assert swarm.state.peers[swarm.peer("q")].finished
    assert_each_sample_counts_once(swarm)


def test_without_a_spare_the_members_wait_in_vain_and_offer_what_they_have(
    play: Play, plan: FaultPlan
) -> None:
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)

    async def lost(swarm: VirtualSwarm) -> None:
        await return_in(swarm, ROUND + 1)

    swarm = play.to_the_end(lost, MIXED, spec=spec_of(), step_seconds=SECONDS)
    assert not repairs(swarm)
    assert [*shares(swarm, "p", ROUND).values()] == [STEP / STEPS]
    assert_each_sample_counts_once(swarm)


def test_a_spare_begins_the_round_where_a_death_was_not_known_when_its_plan_was_made(
    play: Play, plan: FaultPlan
) -> None:
    """The plan of the next round still has the member that dies in the exchange."""
    plan.fail_at("q", None, ROUND, Moment.DECIDED, Action.KILL)

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await return_in(swarm, ROUND + 2)

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec_of(4), step_seconds=SECONDS)
    (repair,) = repairs(swarm)
    assert (repair.from_round, resumed_at(repair)) == (ROUND + 1, [0])
    assert all([*shares(swarm, name, ROUND + 1).values()] == [1.0] for name in seats(swarm, repair))
    assert_each_sample_counts_once(swarm)


def test_a_coordinator_that_starts_again_repairs_what_broke_before(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await swarm.until_fired("q")
        await asyncio.sleep(0.5)
        swarm.coordinator.kill()
        await asyncio.sleep(4.0)
        await swarm.coordinator.start()
        await swarm.until_round(ROUND + 1)
        swarm.start("q")

    swarm = play.to_the_end(lost, MIXED, later=SPARES, spec=spec_of(), step_seconds=SECONDS)
    (repair,) = repairs(swarm)
    assert resumed_at(repair) == [STEP]
    assert [*shares(swarm, "p", ROUND).values()] == [1.0]
    assert_each_sample_counts_once(swarm)


def test_the_only_chain_of_a_run_goes_on_and_its_spare_contributes_at_once(
    play: Play, plan: FaultPlan
) -> None:
    """No other replica has a payload of its stage."""
    plan.fail_at("q", None, ROUND, Moment.BACKWARD, Action.KILL, step=STEP)

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await return_in(swarm, ROUND + 1)

    swarm = play.to_the_end(lost, PIPE, later=SPARES, spec=spec_of(members=PIPE), step_seconds=SECONDS)
    (repair,) = repairs(swarm)
    found = {share for name in seats(swarm, repair) for share in shares(swarm, name, ROUND).values()}
    assert found == {1.0, (STEPS - STEP) / STEPS}
    assert_each_sample_counts_once(swarm)


def test_two_chains_that_break_at_once_are_both_repaired(play: Play) -> None:
    members = {"a": Role.REPLICA, **dict.fromkeys("pquv", Role.STAGE)}
    dead = list[str]()

    async def lost(swarm: VirtualSwarm) -> None:
        await start_spares(swarm)
        await swarm.until_round(ROUND)
        await asyncio.sleep(2.5 * SECONDS)
        names = {swarm.peer(name): name for name in swarm.nodes}
        one, other = (each.members for each in swarm.state.plans[-1].replicas if len(each.members) == 2)
        dead.extend((names[one[0].peer], names[other[1].peer]))
        swarm.kill(*dead)
        await swarm.until_round(ROUND + 1)
        swarm.start(*dead)

    spec = spec_of(members=members, **{"swarm.pipelines": 2})
    swarm = play.to_the_end(lost, members, later=SPARES, spec=spec, step_seconds=SECONDS)
    assert {each.from_round for each in repairs(swarm)} == {ROUND}
    for name in {*"pquv"} - {*dead}:
        assert [*shares(swarm, name, ROUND).values()] == [1.0]
    assert_each_sample_counts_once(swarm)
