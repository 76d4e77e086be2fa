"""A paused run ends the open round, holds the next one, and goes on as if no time had passed."""

from __future__ import annotations

import pytest

from coordinator.run.rounds.deadlines import closes_at
from coordinator.run.state.commands import Await, Drain, Leave, Offer, PauseRun, ResumeRun, Start, Tick
from coordinator.run.state.events import PlanAdopted, RunPaused, RunResumed
from coordinator.status.causes import run_cause
from coordinator.status.messages import event_message, pause_message, run_message
from protocol.errors import ErrorCode
from protocol.status import CauseCode, RunPhase
from protocol.types import Pause, PausedBy, Role
from tests.builders import keyed, spec_of
from tests.support.coordinator_run import (
    Run,
    attest,
    beat_for,
    members_by_replica,
    pass_time,
    play_round,
    play_rounds,
    started_and_attested,
)

A, B, C, D = (keyed(i) for i in range(4))
PAUSE = PauseRun(PausedBy.OPERATOR, "the loss has risen")


@pytest.fixture
def run() -> Run:
    run = started_and_attested(3, rounds=12)
    play_rounds(run, 2)
    return run


def test_the_open_round_ends_and_the_next_one_does_not_begin(run: Run) -> None:
    run.accept(PAUSE)
    assert run.state.pause == Pause(4, PausedBy.OPERATOR, "the loss has risen")
    assert not run.state.is_held
    assert (
        run_message(run.state) == "training: round 3 of 12; then PAUSED by its operator: the loss has risen"
    )
    play_round(run)
    assert run.state.is_held
    assert run_message(run.state) == "PAUSED before round 4 of 12 by its operator: the loss has risen"
    refusal = run.refuse(Offer(A.peer, A.payload(run.spec, 0, 4)), ErrorCode.OFFER_TOO_EARLY)
    assert "The run is paused" in refusal.cause
    run.accept(ResumeRun())
    play_round(run)
    assert run.state.current_round == 5


def test_an_hour_of_pause_costs_no_peer_anything_and_counts_in_no_phase(run: Run) -> None:
    run.accept(PAUSE)
    play_round(run)
    before = run.state
    beat_for(run, 3600, A, B, C)
    assert run.state.phase_seconds == before.phase_seconds
    assert (run.state.absent, run.state.silences, run.state.failures) == ({}, {}, {})
    assert closes_at(run.state) is None
    run.accept(ResumeRun())
    assert run.state.began_at == run.now
    beat_for(run, 10, A, B, C)
    play_round(run)
    assert max(seconds for phases in run.state.phase_seconds.values() for seconds in phases) < 60


def test_both_commands_may_be_repeated(run: Run) -> None:
    assert run.accept(ResumeRun()) == ()
    assert [type(event) for event in run.accept(PAUSE)] == [RunPaused]
    assert run.accept(PauseRun(PausedBy.ALARM, "another reason")) == ()
    assert run.state.pause is not None
    assert run.state.pause.reason == "the loss has risen"
    assert [type(event) for event in run.accept(ResumeRun())] == [RunResumed]
    assert run.accept(ResumeRun()) == ()


def test_a_pause_that_ends_before_the_open_round_holds_nothing(run: Run) -> None:
    run.accept(PAUSE)
    began = run.state.began_at
    run.now += 5
    run.accept(ResumeRun())
    assert run.state.began_at == began
    play_rounds(run, 2)
    assert run.state.current_round == 5


def test_the_open_round_keeps_its_plan_when_a_pause_ends_before_it(run: Run) -> None:
    run.accept(PAUSE)
    run.accept(D.join(run.spec))
    attest(run, D)
    assert [type(event) for event in run.accept(ResumeRun())] == [RunResumed]
    play_round(run)
    assert len(members_by_replica(run)) == 4, "the next round has the newcomer"


def test_a_run_that_is_paused_before_it_starts_makes_its_plan_and_waits() -> None:
    spec = spec_of(2, 2)
    run = Run(spec)
    run.accept(Start())
    run.accept(PAUSE)
    assert "then PAUSED" in run_message(run.state)
    for peer in (A, B):
        run.accept(peer.join(spec, Role.REPLICA))
    assert run.state.phase is RunPhase.TRAINING
    assert run.state.is_held
    run.refuse(Offer(A.peer, A.payload(spec, 0, 1)), ErrorCode.OFFER_TOO_EARLY)
    run.accept(ResumeRun())
    play_round(run)


def test_a_round_that_starts_anew_during_a_pause_waits_as_well(run: Run) -> None:
    run.accept(PAUSE)
    for peer in (A, B, C):
        run.accept(Leave(peer.peer, "a storm"))
    assert not run.state.is_held
    run.now += 30
    run.accept(A.join(run.spec, Role.REPLICA))
    attest(run, A)
    pass_time(run, 30, A)
    assert members_by_replica(run) == {0: [A.peer]}
    assert run.state.is_held
    assert run_cause(run.state).code is CauseCode.PAUSED
    run.accept(ResumeRun())
    play_round(run)


def test_a_run_without_a_complete_replica_is_held_in_its_round(run: Run) -> None:
    for peer in (A, B, C):
        run.accept(Leave(peer.peer, "a storm"))
    run.accept(PAUSE)
    assert run.state.pause == Pause(3, PausedBy.OPERATOR, "the loss has risen")
    assert run_cause(run.state).code is CauseCode.NO_REPLICA


def test_the_round_after_a_pause_begins_with_those_who_are_there(run: Run) -> None:
    run.accept(PAUSE)
    play_round(run)
    run.accept(Drain(B.peer, "the evening"))
    run.accept(Leave(B.peer, "drained"))
    run.accept(D.join(run.spec, Role.REPLICA))
    attest(run, D)
    events = run.accept(ResumeRun())
    assert [type(event) for event in events] == [RunResumed, PlanAdopted]
    plan = run.state.plans[-1]
    assert plan.from_round == run.state.current_round == 4
    seated = {member.peer for replica in plan.replicas for member in replica.members}
    assert seated == {A.peer, C.peer, D.peer}
    play_round(run)


def test_a_replica_that_withholds_during_the_pause_is_not_awaited_after_it(run: Run) -> None:
    """A node may have begun a phase just before it heard of the pause."""
    run.accept(PAUSE)
    play_round(run)
    epoch = run.state.plan_for(4).epoch
    for peer in (A, B, C):
        for stage in range(2):
            run.accept(Await(peer.peer, stage, 4, epoch))
    assert run.state.current_round == 4
    run.accept(ResumeRun())
    run.accept(Tick())
    assert run.state.current_round == 5


def test_the_last_round_ends_although_the_run_is_paused() -> None:
    run = started_and_attested(2, rounds=1)
    run.accept(PAUSE)
    play_round(run)
    assert run.state.phase is RunPhase.FINISHED
    assert "PAUSED" not in run_message(run.state)
    assert pause_message(run.state) == ""
    run.refuse(PAUSE, ErrorCode.BAD_REQUEST)


@pytest.mark.parametrize(
    ("by", "reason", "sentence"),
    [
        (PausedBy.OPERATOR, "", "the run is PAUSED before round 4 by its operator"),
        (PausedBy.ALARM, "a spike", "the run is PAUSED before round 4 by an alarm: a spike"),
    ],
)
def test_the_log_says_who_has_paused_the_run_and_why(
    run: Run, by: PausedBy, reason: str, sentence: str
) -> None:
    (event,) = run.accept(PauseRun(by, reason))
    assert event_message(event) == sentence
