"""Stages that exchange in turn: who has no turn is skipped with the first decision of the round."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coordinator.run.state.commands import Attest, Await, Offer, Report
from coordinator.run.state.events import (
    PayloadWithheld,
    PeerRetreated,
    RoundDecided,
)
from coordinator.run.state.lines import lines_of, rounded_rate
from coordinator.run.state.tokens import payload_tokens
from coordinator.status.causes import run_cause
from coordinator.status.event_levels import log_level
from coordinator.status.run_status import run_status
from coordinator.store.history_tables import StageOutcome
from protocol.errors import ErrorCode
from protocol.status import CauseCode, ReplicaState
from protocol.types import Aborted, Committed, Skipped
from tests.builders import anchor_of, decisions_in, keyed
from tests.support.coordinator_run import (
    Run,
    measure,
    offer,
    pass_time,
    play_rounds,
    play_stage,
    started,
    started_and_attested,
)
from tests.support.history import stored, write_history

A, B = keyed(0), keyed(1)


@pytest.fixture
def run() -> Run:
    """Stage 1 is due in odd rounds, stage 0 in even ones, and both in the last."""
    return started_and_attested(rounds=5, outer__turns=2, outer__overlap=1)


def test_all_other_stages_are_skipped_with_the_first_decision_of_a_round(run: Run) -> None:
    play_stage(run, 1)
    committed, skipped = decisions_in(run.events)
    assert run.state.current_round == 2
    assert (committed, skipped) == tuple(run.state.decisions[stage, 1] for stage in (1, 0))
    assert isinstance(committed, Committed)
    assert isinstance(skipped, Skipped)
    assert skipped.next_epoch == committed.next_epoch
    assert (run.state.committed, run.state.aborted, run.state.silences) == (1, 0, {})


def test_a_whole_run_aborts_nothing_and_counts_every_token_once(run: Run, tmp_path: Path) -> None:
    play_rounds(run, 5)
    state = run.state
    assert (state.committed, state.skipped, state.aborted) == (6, 4, 0)
    payload = A.payload(run.spec, 0, 5)
    of_round = 2 * payload_tokens(run.spec, state.plans[-1].replicas[0], payload)
    assert state.tokens == 5 * of_round  # that payload has one round of progress, as the one before was due
    history = write_history(tmp_path / "history.sqlite", run.spec, stored(run.events))
    found = {each.round_number: [stage.outcome for stage in each.stages] for each in history.rounds(None, 9)}
    assert found[1] == [StageOutcome.SKIPPED, StageOutcome.COMMITTED]
    assert found[2] == [StageOutcome.COMMITTED, StageOutcome.SKIPPED]
    assert found[5] == [StageOutcome.COMMITTED] * 2


def test_a_stage_is_skipped_too_if_the_round_of_the_due_stage_is_aborted(run: Run) -> None:
    offer(run, A, A.payload(run.spec, 1, 1))
    offer(run, B, B.payload(run.spec, 1, 1))
    for peer in (A, B):
        run.accept(Report(peer.peer, 1, 1, ()))
    pass_time(run, run.spec.timing.decide + 1, A, B)
    assert [type(each) for each in decisions_in(run.events)] == [Aborted, Skipped]
    assert (run.state.current_round, run.state.aborted) == (2, 1)


def test_a_payload_or_a_report_of_a_stage_without_a_turn_is_refused_without_a_strike(run: Run) -> None:
    payload = A.payload(run.spec, 0, 1)
    for command in (Offer(A.peer, payload), Report(A.peer, 0, 1, (payload,))):
        assert "no turn" in run.refuse(command, ErrorCode.BAD_REQUEST).cause
    assert run.state.strikes == {}


def test_nobody_withholds_a_payload_of_a_stage_without_a_turn(run: Run) -> None:
    run.accept(Await(A.peer, 0, 1, run.state.epoch))
    assert not any(isinstance(event, PayloadWithheld) for event in run.events)
    assert run.state.answered == {}


def test_the_message_of_the_run_speaks_of_due_stages_alone(run: Run) -> None:
    offer(run, A, A.payload(run.spec, 1, 1))
    cause = run_cause(run.state)
    assert (cause.code, cause.replicas, cause.stages) == (CauseCode.OFFERS_LACKING, (1,), (1,))


def test_a_member_that_is_silent_in_all_its_turns_loses_its_assignment() -> None:
    timing = {"timing__link": 20.0, "timing__match_window": 10.0}
    run = started(1, 1, rounds=60, outer__turns=2, outer__overlap=1, **timing)
    full, upper, lower = keyed(0), keyed(1), keyed(2)
    for stage, peers in ((0, (full, upper)), (1, (full, lower))):
        for peer in peers:
            run.accept(Attest(peer.peer, stage, 0, "stage", anchor_of(stage, 0)))
    while not any(isinstance(event, PeerRetreated) for event in run.events):
        number = run.state.current_round
        assert number < 30, "it is silent for so long"
        stage = number % 2
        pass_time(run, 2, full, upper, lower, step=1.0)
        offering = (full, lower) if stage else (full,)
        payloads = tuple(peer.payload(run.spec, stage, number) for peer in offering)
        for peer, payload in zip(offering, payloads, strict=True):
            run.send(Offer(peer.peer, payload))
        while run.state.round_of(stage, number).group is None:
            pass_time(run, 1, full, upper, lower, step=1.0)
        for peer in offering:
            run.send(Report(peer.peer, stage, number, payloads))
        while run.state.current_round == number:
            pass_time(run, 1, full, upper, lower, step=1.0)
        for stage, peers in ((0, (full, upper)), (1, (full, lower))):
            for peer in peers:
                run.send(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))
    [retreated] = [event for event in run.events if isinstance(event, PeerRetreated)]
    assert retreated.peer == upper.peer


def test_a_replica_exchanges_when_the_group_of_the_due_stage_is_closed(run: Run) -> None:
    for peer in (A, B):
        offer(run, peer, peer.payload(run.spec, 1, 1))
    status = run_status(run.state, (), run.now, run.now)
    assert {each.state for each in status.replicas} == {ReplicaState.EXCHANGES}


def test_a_full_replica_has_its_whole_line_for_the_due_stage(run: Run) -> None:
    measure(run, A, bandwidth=8e6)
    measure(run, B, bandwidth=8e6)
    [line, _] = lines_of(run.state, [peer.payload(run.spec, 1, 1) for peer in (A, B)])
    [last, _] = lines_of(run.state, [peer.payload(run.spec, 1, 5) for peer in (A, B)])
    assert line.uplink == rounded_rate(8e6)
    assert last.uplink == rounded_rate(4e6)


def test_the_log_of_people_does_not_tell_of_each_skipped_stage(run: Run) -> None:
    play_rounds(run, 1)
    levels = {type(e.decision): log_level(e) for e in run.events if isinstance(e, RoundDecided)}
    assert levels == {Committed: logging.INFO, Skipped: logging.DEBUG}
