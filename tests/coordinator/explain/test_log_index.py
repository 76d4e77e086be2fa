"""Which events the index finds for a round and for a peer."""

from __future__ import annotations

from dataclasses import replace

from coordinator.explain.log_index import AdoptedPlan, LogIndex
from coordinator.state import events
from coordinator.state.commands import Offer, Report
from tests.builders import keyed
from tests.support.coordinator_run import Run, play_rounds, started

A, B = keyed(0), keyed(1)


def index_of(run: Run) -> LogIndex:
    index = LogIndex(run.spec.swarm.stages)
    for event in run.events:
        if not isinstance(event, events.PeerSeen):
            index.note(event)
    return index


def stored(run: Run) -> list[events.Event]:
    return [event for event in run.events if not isinstance(event, events.PeerSeen)]


def test_each_round_ends_with_its_last_decision_and_the_next_begins_after_it() -> None:
    run = started(rounds=5)
    play_rounds(run, 3)
    index, log = index_of(run), stored(run)
    assert [marks.number for marks in index.rounds] == [1, 2, 3]
    for marks in index.rounds:
        decided = log[marks.last - 1]
        assert isinstance(decided, events.RoundCommitted)
        assert decided.decision.round_number == marks.number
        own = log[marks.first - 1 : marks.last]
        offered = [each.descriptor for each in own if isinstance(each, events.PayloadOffered)]
        assert {each.round_number for each in offered} == {marks.number}
        assert len(offered) == 4
    assert [marks.first for marks in index.rounds[1:]] == [marks.last + 1 for marks in index.rounds[:-1]]


def test_the_phases_add_up_to_the_round() -> None:
    run = started(rounds=5, stages=1)
    began = run.now
    payloads = tuple(peer.payload(run.spec, 0, 1) for peer in (A, B))
    run.now = began + 10
    run.accept(Offer(A.peer, payloads[0]))
    run.now += 5
    run.accept(Offer(B.peer, payloads[1]))
    run.now += 2
    run.accept(Report(A.peer, 0, 1, payloads))
    run.now += 1
    run.accept(Report(B.peer, 0, 1, payloads))
    (marks,) = index_of(run).rounds
    assert marks.phases == (10.0, 5.0, 3.0, 0.0)
    assert marks.seconds == 18.0
    assert marks.is_committed
    assert not marks.is_aborted


def test_the_open_round_is_measured_up_to_now() -> None:
    run = started(rounds=5)
    play_rounds(run, 1)
    current = index_of(run).current(run.now + 7)
    assert current is not None
    assert (current.number, current.seconds, current.phases[0]) == (2, 7.0, 7.0)


def test_only_the_last_events_of_a_kind_are_kept_for_a_peer() -> None:
    index = LogIndex(1)
    for number in range(100):
        index.note(events.PeerStruck(1.0, A.peer, number, "bad"))
        index.note(events.PeerLost(1.0, A.peer, 20.0))
    found = index.of_peer(A.peer)
    assert len(found) == 18
    assert found[-1] == 200
    assert index.of_peer(B.peer) == ()


def test_a_failed_link_is_about_both_ends_and_a_contribution_about_its_owner() -> None:
    run = started(rounds=5)
    play_rounds(run, 2)
    index = index_of(run)
    index.note(events.LinkFailed(1.0, A.peer, 1, B.peer, "h:1", "refused"))
    assert index.of_peer(A.peer)[-1] == index.of_peer(B.peer)[-1] == index.length
    last = index.rounds[-1].last
    assert last in index.of_peer(A.peer)


def test_a_plan_is_found_by_its_epoch() -> None:
    run = started(rounds=5)
    plan = run.state.plans[-1]
    run.apply(events.PlanAdopted(run.now, replace(plan, epoch=2, from_round=2)))
    index, length = index_of(run), len(stored(run))
    assert index.plans == {1: AdoptedPlan(length - 1, 1), 2: AdoptedPlan(length, 2)}
    assert [index.epoch_of(number) for number in (0, 1, 2, 3)] == [1, 1, 2, 2]
