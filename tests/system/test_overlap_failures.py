"""Overlap when rounds abort, peers fail, leave or come late: no step is lost or counted twice."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

from coordinator.run.state.events import PeerLost, PeerRetreated, PlanAdopted
from node.exchange.transport import ExchangeResult
from protocol.math.sampling import sample_range
from protocol.spec.fixed import EXTRA_STEPS
from protocol.types import Committed, PayloadDescriptor, PeerId, Role
from tests.builders import decisions_in
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.overlap import (
    AHEAD,
    LOSSLESS,
    Records,
    applied_by,
    assert_balanced,
    spec_of,
    steps_before_the_update,
)
from tests.virtual.network import current_machine
from tests.virtual.scenario import FULL, MIXED, TWO, Play, contributions, departures, not_found, return_after
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.transport import VirtualArbiter, VirtualTransport


def holding_only_its_own(rounds: set[int], stage: int) -> Any:
    """VirtualTransport.exchange in which each peer of `stage` gets only its own payload in `rounds`."""
    exchange = VirtualTransport.exchange

    async def alone(
        self: VirtualTransport,
        payload: bytes,
        descriptor: PayloadDescriptor,
        *args: Any,
        **more: Any,
    ) -> ExchangeResult:
        if descriptor.stage == stage and descriptor.round_number in rounds:
            await self.server.services[stage].payloads.hold(descriptor, bytes(payload))
            return ExchangeResult((descriptor,), ())
        return await exchange(self, payload, descriptor, *args, **more)

    return alone


def test_what_was_learned_around_an_aborted_round_counts_in_the_next(
    play: Play, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualTransport, "exchange", holding_only_its_own({2, 3}, stage=1))
    monkeypatch.setattr(VirtualArbiter, "arbitrate", not_found)
    spec = spec_of(MIXED, **LOSSLESS)
    swarm = play.to_the_end(None, MIXED, spec=spec)
    assert (swarm.committed(0), swarm.committed(1)) == ([1, 2, 3, 4, 5], [1, 4, 5])
    expected = {key: {steps} for key, steps in steps_before_the_update(spec).items()}
    assert applied_by(records, *MIXED) == expected
    assert_balanced(swarm, records, *MIXED)


def test_a_replica_whose_payload_is_left_out_loses_nothing(
    play: Play, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, peers = VirtualTransport.exchange, dict[str, PeerId]()

    async def without_c(
        self: VirtualTransport, payload: bytes, own: PayloadDescriptor, *args: Any, **more: Any
    ) -> ExchangeResult:
        found = await exchange(self, payload, own, *args, **more)
        if (current_machine(), own.stage, own.round_number) in {("a", 0, 3), ("b", 0, 3)}:
            kept = tuple(each for each in found.held if each.owner != peers["c"])
            return ExchangeResult(kept, found.rejected)
        return found

    async def told(swarm: VirtualSwarm) -> None:
        peers["c"] = swarm.peer("c")

    monkeypatch.setattr(VirtualTransport, "exchange", without_c)
    monkeypatch.setattr(VirtualArbiter, "arbitrate", not_found)
    swarm = play.to_the_end(told, FULL, spec=spec_of(FULL, **LOSSLESS))
    decisions = decisions_in(swarm.events, Committed)
    owners = [{e.descriptor.owner for e in each.entries} for each in decisions if each.stage == 0]
    assert [peers["c"] in each for each in owners] == [True, True, False, True, True]
    assert_balanced(swarm, records, *FULL)


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("b", Moment.PHASE),
        ("p", Moment.NORM),
        pytest.param("q", Moment.COOL_DOWN, marks=pytest.mark.slow),
        pytest.param("q", Moment.APPLY, marks=pytest.mark.slow),
    ],
)
def test_a_node_that_is_killed_in_overlapping_steps_comes_back_and_all_peers_agree(
    play: Play, plan: FaultPlan, records: Records, name: str, moment: Moment
) -> None:
    # The second step of round 4 overlaps with the exchange of round 3.
    plan.fail_at(name, None, 4, moment, Action.KILL, step=1)

    async def killed(swarm: VirtualSwarm) -> None:
        await swarm.until_fired(name)
        assert (3, 0) not in records[name].applied
        await return_after(swarm, name, 5)

    spec = spec_of(MIXED, rounds=6, **{"inner.microbatches": 3, **LOSSLESS})
    swarm = play.to_the_end(killed, MIXED, spec=spec)
    assert swarm.committed(0) == swarm.committed(1) == contributions(swarm, "a") == swarm.rounds
    assert contributions(swarm, name)[-1] == 6
    # The other nodes have lost nothing, also the neighbour of the killed node.
    assert_balanced(swarm, records, *sorted(MIXED.keys() - {name}))


@pytest.mark.parametrize("seconds", [10, pytest.param(600, marks=pytest.mark.slow)])
def test_without_a_coordinator_replicas_train_the_overlap_and_then_a_bounded_number_of_steps(
    play: Play, plan: FaultPlan, records: Records, seconds: int
) -> None:
    plan.fail_at("a", 0, 3, Moment.GATHERED, Action.DELAY, seconds=0.0)

    async def away(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("a")
        swarm.coordinator.kill()
        await asyncio.sleep(seconds)
        await swarm.coordinator.start()

    spec = spec_of(MIXED, **LOSSLESS)
    swarm = play.to_the_end(away, MIXED, spec=spec)
    assert not swarm.happened(PeerLost, PeerRetreated)
    found = swarm.measured()
    assert {each["steps"] for each in found.values()} == {spec.inner.steps}
    extra = {each["extra_steps"] for (_, number), each in found.items() if number == 3}
    assert extra == {EXTRA_STEPS} if seconds == 600 else max(extra) <= EXTRA_STEPS
    assert {each["extra_steps"] for (_, number), each in found.items() if number != 3} == {0}
    expected = {key: {steps} for key, steps in steps_before_the_update(spec).items()}
    expected |= {(3, stage): {AHEAD + steps for steps in extra} for stage in (0, 1)}
    assert applied_by(records, *MIXED) == expected
    tokens = spec.inner.microbatch_size * spec.model.context * spec.inner.steps
    assert {each["tokens"] for each in found.values()} == {tokens}
    assert_balanced(swarm, records, *MIXED)


def test_a_plan_that_changes_during_the_overlap_applies_from_the_next_step(
    play: Play, records: Records
) -> None:
    """A replica is lost while the others train ahead; they take other samples, and the same steps."""
    spec, rest = spec_of(MIXED, rounds=7, **LOSSLESS), "bpq"

    async def lost(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        await asyncio.sleep(0.5)
        swarm.kill("a")

    swarm = play.to_the_end(lost, MIXED, spec=spec, ending=rest)
    plans = [event.plan for event in swarm.happened(PlanAdopted)]
    assert len(plans) == 2
    changed = plans[1].from_round
    assert all(contributions(swarm, name) == swarm.rounds for name in rest)
    assert all(set(records[name].trained.values()) == {1} for name in rest)
    assert applied_by(records, *rest)[changed - 1, 0] == {AHEAD}
    readers = [name for name in rest if records[name].samples]
    assert len(readers) == 2
    for name, step in product(readers, range(spec.inner.steps)):
        plan = plans[0] if step < AHEAD else plans[1]
        replica = plan.replica_of(swarm.peer(name))
        assert replica is not None
        samples, size = sample_range(plan, spec, changed, replica.index), spec.inner.microbatch_size
        assert records[name].samples[changed, step] == [*samples[step * size : (step + 1) * size]]
    assert_balanced(swarm, records, *rest)


def test_a_slow_replica_that_has_no_time_for_the_overlap_still_counts(play: Play, records: Records) -> None:
    async def slowed(swarm: VirtualSwarm) -> None:
        swarm.nodes["c"].speed = 0.1

    spec = spec_of(FULL, **{"inner.steps": 10, "outer.overlap": 5, **LOSSLESS})
    swarm = play.to_the_end(slowed, FULL, spec=spec)
    weights = swarm.weights("c")
    assert len(weights) > 2
    assert all(0 < weight < 0.6 for weight in weights)
    assert {steps for name in "ab" for steps in records[name].applied.values()} == {5, 0}
    assert all(steps <= 5 for steps in records["c"].applied.values())
    assert max(records["c"].trained.values()) == 1
    assert_balanced(swarm, records, *FULL)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("a", 0.1),
        ("p", 3.9),
        pytest.param("p", 0.1, marks=pytest.mark.slow),
        pytest.param("q", 2.5, marks=pytest.mark.slow),
    ],
)
def test_a_node_that_drains_finishes_its_round_and_keeps_what_it_has_not_sent(
    play: Play, records: Records, name: str, after: float
) -> None:
    """It drains in overlapping steps, when the next plan already includes it, or in the steps after them."""

    async def drained(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        await asyncio.sleep(after)
        swarm.drain(name)
        await swarm.until_over(name, seconds=20)
        assert departures(swarm, name) == ["drained"]
        assert not swarm.happened(PeerLost, PeerRetreated)
        assert contributions(swarm, name) == [1, 2, 3]
        kept = swarm.nodes[name].folder / "checkpoint" / "round-000003"
        assert kept.exists(), sorted(kept.parent.iterdir())
        swarm.start(name)

    swarm = play.to_the_end(drained, MIXED, spec=spec_of(MIXED, rounds=6))
    assert contributions(swarm, name)[-1] == 6
    assert records[name].forgotten == 0
    assert swarm.committed(0) == swarm.rounds


def test_a_late_member_has_no_overlap_in_its_first_round_and_the_same_as_others_later(
    play: Play, records: Records
) -> None:
    async def later(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        swarm.start("late")

    spec = spec_of(TWO, rounds=8, **LOSSLESS)
    swarm = play.to_the_end(later, TWO, later={"late": Role.REPLICA}, spec=spec)
    counted, applied = contributions(swarm, "late"), records["late"].applied
    assert counted[-1] == 8
    followed = {number for (number, _), steps in applied.items() if steps < 0}
    assert followed == set(range(min(number for number, _ in applied), counted[0]))
    assert {applied[number, 0] for number in counted[:-1]} == {AHEAD}
    assert {steps for name in TWO for steps in records[name].applied.values()} == {AHEAD, 0}
    assert_balanced(swarm, records, *swarm.nodes)
