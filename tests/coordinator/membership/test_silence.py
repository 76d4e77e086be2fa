"""A live peer that answers in no round loses its assignment."""

from __future__ import annotations

from coordinator.membership.silence import MOST_SILENT_ROUNDS
from coordinator.run.state.commands import Attest, Await, Offer, Report
from coordinator.run.state.events import PeerRetreated
from protocol.types import Committed, Role
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import Run, joined_run, pass_time

A, B = keyed(0), keyed(1)
ROUNDS = 40


def pair() -> Run:
    run = joined_run(
        spec_of(1, 2, rounds=ROUNDS, timing__link=20.0, timing__match_window=10.0), Role.REPLICA, Role.REPLICA
    )
    for peer in (A, B):
        run.accept(Attest(peer.peer, 0, 0, "stage", anchor_of(0, 0)))
    return run


def round_of(run: Run, *offering: Keyed, withholding: tuple[Keyed, ...] = ()) -> bool:
    """A round in which only these live peers answer, after 2 s. Returns whether it commits."""
    number = run.state.current_round
    pass_time(run, 2, A, B, step=1.0)
    payloads = tuple(peer.payload(run.spec, 0, number) for peer in offering)
    for peer, payload in zip(offering, payloads, strict=True):
        run.accept(Offer(peer.peer, payload))
    for peer in withholding:
        run.accept(Await(peer.peer, 0, number, epoch=run.state.plans[-1].epoch))
    while run.state.round_of(0, number).group is None:
        pass_time(run, 1, A, B, step=1.0)
    for peer in offering:
        run.accept(Report(peer.peer, 0, number, payloads))
    for peer in offering:
        run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number)))
    return isinstance(run.state.decisions[0, number], Committed)


def test_of_two_replicas_the_silent_one_is_dropped_and_the_other_goes_on_alone() -> None:
    run = pair()
    assert round_of(run, A, B)
    committed = [round_of(run, A) for _ in range(10)]
    assert committed == sorted(committed), "first all rounds abort, then all commit"
    assert MOST_SILENT_ROUNDS <= committed.index(True) <= 7
    assert [event.peer for event in run.events if isinstance(event, PeerRetreated)] == [B.peer]
    assert "goes on without replica-1" in run.state.plans[-1].reason


def test_who_opens_its_links_for_long_keeps_its_assignment() -> None:
    run = pair()
    limit = run.spec.timing.link + run.spec.timing.match_window
    began = run.now
    while run.now - began < limit - 10:
        round_of(run, A)
    assert run.state.current_round > MOST_SILENT_ROUNDS
    assert round_of(run, A, B)
    assert not any(isinstance(event, PeerRetreated) for event in run.events)


def test_who_withholds_is_not_silent() -> None:
    run = pair()
    for _ in range(20):
        round_of(run, A, withholding=(B,))
    assert not any(isinstance(event, PeerRetreated) for event in run.events)


def dropped(run: Run) -> list[str]:
    return [event.peer for event in run.events if isinstance(event, PeerRetreated)]


def test_an_answer_ends_a_silence() -> None:
    run = pair()
    assert round_of(run, A, B)
    for _ in range(8):
        round_of(run, A)
        for _ in range(3):
            assert round_of(run, A, B)
    assert not dropped(run), "it answers in three of four rounds"


def test_who_answers_one_round_in_three_is_dropped_and_rests() -> None:
    run = pair()
    answers = 0
    for number in range(1, 13):
        if not run.state.takes_part(B.peer, number):
            break
        answers += number % 3 == 1
        round_of(run, *((A, B) if number % 3 == 1 else (A,)))
    assert dropped(run) == [B.peer]
    assert answers >= 2, "three silent rounds in a row are another rule"
    for number in range(run.state.current_round, run.state.current_round + 12):
        run.accept(Attest(B.peer, 0, number - 1, "stage", anchor_of(0, number - 1)))
        assert round_of(run, A), "the others commit without it"
        assert B.peer not in run.state.assignments[run.state.plans[-1].epoch]


def test_after_its_rest_it_has_to_answer_in_all_rounds_at_first() -> None:
    run = pair()
    while not dropped(run):
        number = run.state.current_round
        round_of(run, *((A, B) if number % 3 == 1 else (A,)))
    while B.peer not in run.state.assignments[run.state.plans[-1].epoch]:
        number = run.state.current_round
        run.accept(Attest(B.peer, 0, number - 1, "stage", anchor_of(0, number - 1)))
        round_of(run, A)
    assert round_of(run, A, B)
    round_of(run, A)
    round_of(run, A)
    assert dropped(run) == [B.peer, B.peer]
