"""New plans after repeated failures, and after any history of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.base.phrases import short
from coordinator.placement.replan import next_plan, rebuilt_chain
from coordinator.placement.rules import peer_rests_until
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import ChangeRun, Retreat
from coordinator.run.state.records import OpenPlace
from coordinator.run.state.state import State
from coordinator.status.causes import peer_cause
from protocol.status import CauseCode
from protocol.types import Dialer, Link, Plan, ReservedAssignment, Role, StageRange
from tests.builders import Keyed
from tests.support.coordinator_run import (
    ALL,
    Run,
    codes_of,
    drain,
    join,
    latest_reason,
    leave,
    measure,
    members_by_replica,
    pass_time,
    play_rounds,
    started_and_attested,
)
from tests.support.plan_rules import violations

A, B, C, D, E, F = ALL[:6]


class TestRepeatedFailures:
    def lose_and_rejoin(self, run: Run, peer: Keyed, times: int) -> None:
        for _ in range(times):
            leave(run, peer)
            join(run, peer)
            number = run.state.current_round
            play_rounds(run)
            assert run.state.failures[peer.peer][1] == number

    def test_a_peer_that_is_lost_again_and_again_rests_longer_each_time(self) -> None:
        run = started_and_attested(1, 1)
        self.lose_and_rejoin(run, C, 3)
        assert run.state.failures[C.peer] == (3, 3)
        assert peer_rests_until(run.state, C.peer) == 7
        assert codes_of(peer_cause(run.state, C.peer))[-1] is CauseCode.MEMBER_RESTS
        play_rounds(run, 2)
        assert sorted(members_by_replica(run)) == [0]
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer], 1: [B.peer, C.peer]}

    def test_a_spare_takes_its_assignment_while_it_rests(self) -> None:
        run = started_and_attested(1, 1, grouping__spares=9)
        join(run, D)
        self.lose_and_rejoin(run, C, 3)
        join(run, E)
        play_rounds(run)
        assert members_by_replica(run)[1] == [B.peer, E.peer]
        assert (
            f"{short(E.peer)} for {short(C.peer)} (stage 1), which rests until round 7 after 3 failures"
            in latest_reason(run)
        )

    def test_the_first_spare_that_its_neighbours_take_is_found_behind_a_stranger(self) -> None:
        """A peer without scores stands beside none that counts, whichever of the two has an endpoint."""
        run = started_and_attested(1, 1, grouping__spares=9)
        join(run, D)
        join(run, E)
        place = OpenPlace(since=0.0, asked=0.0, source="", admitted=True)
        state = replace(
            run.state, discounted=frozenset({D.peer}), open_places={D.peer: place}, failed_links={}
        )
        first, last = StageRange(0, 1), StageRange(1, 2)
        spares = [ReservedAssignment(each.peer, 2, 0, first) for each in (D, E)]
        ready = {(1, 1): ReservedAssignment(C.peer, 1, 1, last)}
        held = ready | {(1, 0): ReservedAssignment(D.peer, 1, 0, first)}
        for holders, others in ((ready, spares), (held, spares[1:])):  # vacant, then held by the stranger
            chain = rebuilt_chain(state, 1, holders, others, is_lenient=False)
            assert [each.peer for each in chain or ()] == [E.peer, C.peer]

    def test_a_committed_round_removes_a_failure(self) -> None:
        run = started_and_attested(1, 1)
        self.lose_and_rejoin(run, C, 1)
        assert members_by_replica(run)[1] == [B.peer, C.peer]
        play_rounds(run)
        assert not run.state.failures

    def test_no_peer_rests_while_no_other_replica_trains(self) -> None:
        run = started_and_attested(0, 1)
        for _ in range(3):
            leave(run, B)
            join(run, B)
            pass_time(run, run.spec.timing.heartbeat, A, B)
            play_rounds(run)
        assert members_by_replica(run)[0] == [A.peer, B.peer]

    def test_a_retreat_from_a_neighbour_that_is_lost_is_no_failure(self) -> None:
        run = started_and_attested(1, 1)
        leave(run, C)
        run.accept(Retreat(B.peer, 1, "neighbour-lost"))
        assert run.state.failures == {C.peer: (1, 1)}


def shuffled(state: State, seed: int) -> State:
    """The same state with every mapping in another order."""
    order = random.Random(seed)

    def mixed(value: object) -> object:
        if isinstance(value, Mapping):
            items = [(key, mixed(each)) for key, each in value.items()]
            order.shuffle(items)
            return dict(items)
        return value

    return replace(state, **{each.name: mixed(getattr(state, each.name)) for each in fields(state)})


steps = st.lists(
    st.tuples(
        st.sampled_from(["joins", "dies", "drains", "measures", "all measure", "round", "round"]),
        st.integers(0, 9),
        st.sampled_from([1e8, 2e8, 1e9]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 2), st.integers(0, 2**16))
@example(
    script=[
        *[("dies", 0, 1e8), ("dies", 1, 1e8), ("all measure", 0, 1e8)],
        *[("round", 0, 1e8), ("drains", 3, 1e8), ("drains", 5, 1e8)],
    ],
    spares=0,
    seed=0,
)
def test_plans_after_any_history_are_valid_and_do_not_depend_on_order(
    script: list[tuple[str, int, float]], spares: int, seed: int
) -> None:
    run = started_and_attested(1, 3, rounds=60, grouping__spares=spares, link__least_k=2, link__most_k=16)
    for what, number, flops in script:
        peer = ALL[number]
        known = run.state.peers.get(peer.peer)
        is_live = known is not None and known.is_live
        if what == "joins" and not is_live:
            run.accept(peer.join(run.spec, Role.STAGE if number else Role.REPLICA, memory_bytes=0))
        elif what == "dies" and is_live:
            leave(run, peer)
        elif what == "drains" and is_live:
            drain(run, peer)
        elif what == "measures" and is_live:
            measure(run, peer, flops, bandwidth=flops / 1e4)
        elif what == "all measure":
            for i, each in enumerate(ALL):
                if each.peer in run.state.peers and run.state.peers[each.peer].is_live:
                    measure(run, each, flops if (number + i) % 3 else 10 * flops, bandwidth=1e7)
        elif what == "round" and run.state.complete_replicas(run.state.current_round):
            play_rounds(run)
        state, next_round = run.state, run.state.current_round + 1
        found = next_plan(state, next_round)
        assert next_plan(shuffled(state, seed), next_round) == found
        if isinstance(found, Plan):
            assert_valid(run, found)
    assert replay(State(run.spec, run.spec.name), run.events) == run.state


def assert_valid(run: Run, plan: Plan) -> None:
    assert not [*violations(run.state, plan)]
    usual = run.spec.inner.microbatches
    assert all(each.weight == run.spec.microbatches_of(each) / usual for each in plan.replicas)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (lambda plan: replace(plan, epoch=plan.epoch + 1), "follows plan"),
        (lambda plan: replace(plan, reason=""), "no reason"),
        (lambda plan: replace(plan, replicas=plan.replicas[:1]), "left out although its members can stay"),
        (lambda plan: with_second(plan, index=0), "assigns a peer twice"),
        (lambda plan: with_second(plan, microbatches=99), "does not divide the batch"),
        (lambda plan: with_second(plan, links=()), "a link between each two neighbours"),
        (lambda plan: with_second(plan, links=(Link(999, Dialer.UPSTREAM),)), "k the run does not allow"),
        (lambda plan: with_members(plan, endpoint=""), "two neighbours that can only dial"),
        (lambda plan: with_members(plan, stages=StageRange(0, 1)), "each stage once"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_told(changed: Callable[[Plan], Plan], what: str) -> None:
    run = started_and_attested(1, 1)
    plan = replace(run.state.plans[-1], epoch=2)
    assert not [*violations(run.state, plan)]
    assert any(what in each for each in violations(run.state, changed(plan)))


def with_second(plan: Plan, **fields: Any) -> Plan:
    """`plan` whose pipeline has other `fields`; with another index, also another copy of it."""
    second = replace(plan.replicas[1], **fields)
    return replace(plan, replicas=(*plan.replicas[: 1 + ("index" in fields)], second))


def with_members(plan: Plan, **fields: Any) -> Plan:
    return with_second(plan, members=tuple(replace(each, **fields) for each in plan.replicas[1].members))


def test_a_change_whose_round_had_no_plan_holds_from_the_next_plan_on() -> None:
    """Nodes that apply the rounds between again must use the settings with which these were trained."""
    run = started_and_attested(1, 1)
    run.accept(ChangeRun(("inner.steps=7",), 2, ""))
    plan = next_plan(run.state, 4)
    assert plan is not None
    assert [(each.from_round, each.settings) for each in plan.changes] == [(4, ("inner.steps=7",))]
    assert [each.from_round for each in run.state.changes] == [2]


def test_data_change_at_the_first_sample_of_their_plan_and_later_plans_keep_that_sample() -> None:
    run = started_and_attested(1, 1)
    told = 'data.source="text:other"'
    run.accept(ChangeRun((told,), 3, ""))
    play_rounds(run, 3)
    plan = run.state.plans[-1]
    assert (plan.from_round, plan.first_sample) == (3, 2 * 2 * run.spec.samples_per_round())
    [change] = plan.changes
    assert change.first_sample == plan.first_sample
    [past] = run.state.spec_under(plan).data.past or ()
    assert (past.source, past.samples) == (run.spec.data.source, plan.first_sample)
    leave(run, B)
    play_rounds(run, 2)
    later = run.state.plans[-1]
    assert later.epoch > plan.epoch
    assert later.changes == plan.changes
    assert run.state.spec.data == run.state.spec_under(plan).data


def test_a_new_member_must_stay_be_reserved_fit_and_have_followed_the_rounds() -> None:
    run = started_and_attested(1, 1)
    plan = replace(run.state.plans[-1], epoch=2)
    first, last = plan.replicas[1].members
    swapped = (replace(first, peer=last.peer), replace(last, peer=first.peer))
    play_rounds(run, 3)
    drain(run, B)
    run.state = replace(run.state, synced=run.state.synced.set(C.peer, {0: 1, 1: 1}))
    found = " ".join(violations(run.state, with_second(replace(plan, from_round=5), members=swapped)))
    for what in ("does not stay", "other stages than were reserved", "is behind"):
        assert what in found
