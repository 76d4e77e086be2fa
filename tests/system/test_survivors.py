"""A member of a pipeline dies: the others contribute what they have finished, and lose no round."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.run.state.events import PeerLost
from node.net.link import LiveLink
from protocol.spec.run import RunSpec
from protocol.types import Frame, FrameKind, Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.overlap import LOSSLESS, Records, assert_balanced
from tests.virtual.network import current_machine
from tests.virtual.scenario import (
    MIXED,
    QUICK,
    SPARSE,
    Play,
    assert_each_sample_counts_once,
    contributions,
    owners,
    return_after,
    shares,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm

ROUND, STEP, STEPS = 2, 1, 3
TRIO = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE, "r": Role.STAGE}
PAIRS = {"a": Role.REPLICA, **dict.fromkeys("pquv", Role.STAGE)}


def spec_of(members: Mapping[str, Role], rounds: int = 5, **settings: Any) -> RunSpec:
    """Rounds of three steps; a microbatch is under way at each member of a chain."""
    is_trio = sum(role is Role.STAGE for role in members.values()) == 3
    shape = {"swarm.stages": 3, "swarm.pipelines": 1} if is_trio else {}
    steps = {"inner.steps": STEPS, "inner.microbatches": 4, "recovery.checkpoint_every": 1}
    return swarm_spec(members, rounds, **{**steps, **shape, **QUICK, **settings})


@pytest.mark.parametrize(
    ("members", "name", "moment", "settings"),
    [
        (MIXED, "q", Moment.FORWARD, {}),
        (MIXED, "p", Moment.BACKWARD, {}),
        (TRIO, "q", Moment.NORM, {}),
        (MIXED, "q", Moment.FORWARD, {"outer.overlap": 1}),
        pytest.param(TRIO, "p", Moment.PHASE, {}, marks=pytest.mark.slow),
        pytest.param(TRIO, "r", Moment.COOL_DOWN, {}, marks=pytest.mark.slow),
        pytest.param(TRIO, "q", Moment.APPLY, {"outer.overlap": 1}, marks=pytest.mark.slow),
    ],
)
def test_after_a_death_in_a_step_each_other_stage_has_the_weight_of_its_finished_steps(
    play: Play,
    plan: FaultPlan,
    records: Records,
    members: Mapping[str, Role],
    name: str,
    moment: Moment,
    settings: Mapping[str, Any],
) -> None:
    plan.fail_at(name, None, ROUND, moment, Action.KILL, step=STEP)
    spec = spec_of(members, **{**SPARSE, **LOSSLESS, **settings})
    swarm = play.to_the_end(lambda swarm: return_after(swarm, name, 5), members, spec=spec)
    pipeline = {each for each, role in members.items() if role is Role.STAGE}
    done = (STEP + (moment is Moment.APPLY)) / STEPS
    for survivor in pipeline - {name}:
        (share,) = shares(swarm, survivor, ROUND).values()
        trained = [times for (number, _), times in records[survivor].trained.items() if number == ROUND]
        assert (share, trained) == (done, [1] * round(done * STEPS))
        assert shares(swarm, survivor, ROUND - 1).keys() == shares(swarm, survivor, ROUND).keys()
    assert shares(swarm, name, ROUND) == {}
    for stage in range(spec.swarm.stages):
        assert owners(swarm, stage, ROUND) - pipeline == members.keys() - pipeline
    found = {each: contributions(swarm, each) for each in members}
    assert all(numbers[-1] == spec.rounds for numbers in found.values()), found
    assert_each_sample_counts_once(swarm)
    # All that they have learned is sent once, in the error feedback, or kept for the next payload.
    assert_balanced(swarm, records, *sorted(members.keys() - {name}))


def test_a_death_while_the_norm_travels_leaves_the_stages_one_step_apart(
    play: Play, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the norm finishes the step, whose gradients are complete at all members; the others drop it."""
    send, killed = LiveLink.send, list[str]()

    async def kill_at_the_norm(self: LiveLink, frame: Frame, deadline: float) -> None:
        at = frame.id.kind, frame.id.round_number, frame.id.step, current_machine()
        if at == (FrameKind.STEP, ROUND, STEP, "q") and not killed:
            killed.append("q")
            swarms[0].kill("q")
            await asyncio.sleep(0)
        await send(self, frame, deadline)

    swarms = list[VirtualSwarm]()

    async def returned(swarm: VirtualSwarm) -> None:
        swarms.append(swarm)
        await swarm.until(lambda _: bool(killed), "the death of q")
        await swarm.until_round(ROUND + 1)
        swarm.start("q")

    monkeypatch.setattr(LiveLink, "send", kill_at_the_norm)
    swarm = play.to_the_end(returned, TRIO, spec=spec_of(TRIO))
    assert killed == ["q"]
    found = [shares(swarm, name, ROUND) for name in "pqr"]
    assert dict(sorted(each for name in found for each in name.items())) == {
        0: (STEP + 1) / STEPS,
        2: STEP / STEPS,
    }
    assert_each_sample_counts_once(swarm)


def test_two_deaths_in_a_round_in_two_pipelines_leave_both_stages_a_payload_of_each(
    play: Play, plan: FaultPlan
) -> None:
    plan.fail_at("p", None, ROUND, Moment.FORWARD, Action.KILL, step=STEP)

    async def another(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("p")
        names = {swarm.peer(name): name for name in swarm.nodes}
        chains = [[names[member.peer] for member in each.members] for each in swarm.state.plans[-1].replicas]
        (hit,) = (each for each in chains if "p" in each)
        (other,) = (each for each in chains if len(each) == 2 and each != hit)
        dying = other[1 - hit.index("p")]
        await asyncio.sleep(1.0)
        swarm.kill(dying)
        left.extend({*hit, *other} - {"p", dying})
        await swarm.until_round(ROUND + 1)
        swarm.start("p", dying)

    left = list[str]()
    swarm = play.to_the_end(another, PAIRS, spec=spec_of(PAIRS))
    assert len(left) == 2
    found = [shares(swarm, name, ROUND) for name in left]
    assert {stage for each in found for stage in each} == {0, 1}
    assert all(STEP / STEPS <= share < 1.0 for each in found for share in each.values())
    assert all(owners(swarm, stage, ROUND) - {*left} == {"a"} for stage in (0, 1))
    assert_each_sample_counts_once(swarm)


def test_two_deaths_in_one_chain_leave_the_last_member_what_it_has(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, ROUND, Moment.FORWARD, Action.KILL, step=STEP)
    plan.fail_at("r", None, ROUND, Moment.PROPOSED, Action.KILL)

    async def returned(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("r")
        await swarm.until_round(ROUND + 1)
        swarm.start("q", "r")

    swarm = play.to_the_end(returned, TRIO, spec=spec_of(TRIO))
    assert shares(swarm, "q", ROUND) == shares(swarm, "r", ROUND) == {}
    assert [*shares(swarm, "p", ROUND).values()] == [STEP / STEPS]
    assert_each_sample_counts_once(swarm)


@pytest.mark.parametrize("moment", [Moment.PROPOSED, Moment.MATCHED, Moment.GATHERED])
@pytest.mark.parametrize("overlap", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_death_in_the_exchange_interrupts_no_other_exchange(
    play: Play, plan: FaultPlan, moment: Moment, overlap: int
) -> None:
    plan.fail_at("q", None, ROUND, moment, Action.KILL)
    spec = spec_of(MIXED, **{"outer.overlap": overlap})
    swarm = play.to_the_end(lambda swarm: return_after(swarm, "q", 5), MIXED, spec=spec)
    assert [*shares(swarm, "p", ROUND).values()] == [1.0]
    assert all(owners(swarm, stage, ROUND) >= {"a", "b"} for stage in (0, 1))
    assert_each_sample_counts_once(swarm)


@pytest.mark.parametrize("is_stopped", [True, False], ids=["a machine that stands still", "a line"])
def test_the_loss_of_a_machine_or_of_a_line_in_a_step_costs_the_others_that_step(
    play: Play, plan: FaultPlan, is_stopped: bool
) -> None:
    action = Action.STOP if is_stopped else Action.DELAY
    plan.fail_at("q", None, ROUND, Moment.FORWARD, action, step=STEP, seconds=12.0 if is_stopped else 0.5)

    async def lost(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("q")
        if not is_stopped:
            swarm.network.isolate("q")
        await swarm.until(lambda _: bool(swarm.happened(PeerLost)), "the loss of q", seconds=30)
        await swarm.until_round(ROUND + 1)
        swarm.network.heal()

    swarm = play.to_the_end(lost, MIXED, spec=spec_of(MIXED, 9, **{"timing.link": 3.0}))
    assert [*shares(swarm, "p", ROUND).values()] == [STEP / STEPS]
    assert shares(swarm, "q", ROUND) == {}
    assert contributions(swarm, "q")[-1] == contributions(swarm, "p")[-1] == 9
    assert_each_sample_counts_once(swarm)


def test_both_ends_of_a_line_that_breaks_contribute(play: Play) -> None:
    async def broken(swarm: VirtualSwarm) -> None:
        await swarm.until_round(ROUND)
        await asyncio.sleep(2.6)
        swarm.network.reset("p", "q")

    # So long a round that both are in the next one, too.
    swarm = play.to_the_end(broken, MIXED, spec=spec_of(MIXED, **{"inner.steps": 5}))
    assert not swarm.happened(PeerLost)
    found = [shares(swarm, name, ROUND) for name in "pq"]
    assert {stage for each in found for stage in each} == {0, 1}
    assert all(0 < share < 1 for each in found for share in each.values())
    assert all(contributions(swarm, name) == swarm.rounds for name in MIXED)
    assert_each_sample_counts_once(swarm)
