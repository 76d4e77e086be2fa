"""The ledger: the credit of peers from events."""

from __future__ import annotations

import pytest

from coordinator.history.ledger import Ledger
from coordinator.state.commands import Drain, Unname
from coordinator.state.event_codec import decode
from coordinator.state.events import PeerNamed
from tests.builders import former_log, keyed, spec_of
from tests.support.coordinator_run import Run, play_round, started


def recorded(run: Run) -> Ledger:
    ledger = Ledger(run.spec)
    for event in run.events:
        ledger.record(event)
    return ledger


@pytest.fixture
def run() -> Run:
    """Three rounds of a full replica and a pipeline; one member did a part of its work, one leaves."""
    run = started(replicas=1, pipelines=1, rounds=10)
    play_round(run)
    play_round(run, done={0: 0.75})
    run.accept(Drain(keyed(0).peer, "r"))
    play_round(run)
    return run


def test_credit_only_grows(run: Run) -> None:
    ledger, former = Ledger(run.spec), (0, 0, 0)
    for event in run.events:
        ledger.record(event)
        earned = ledger.of(keyed(0).peer)
        now = (earned.stage_tokens, earned.stage_rounds, earned.payload_bytes)
        assert all(a <= b for a, b in zip(former, now, strict=True))
        former = now
    assert (earned.first_round, earned.last_round) == (1, 3)
    full = run.spec.samples_per_round() * run.spec.model.context
    # Two stages each round, and three quarters of the second round.
    assert ledger.of(keyed(0).peer).stage_tokens == 2 * (full + round(0.75 * full) + full)


def test_a_log_of_the_first_release_has_credit() -> None:
    spec = spec_of(2, 2, 1, 4)
    events = [decode(kind, text) for kind, text in former_log()]
    ledger = Ledger(spec)
    for event in events:
        ledger.record(event)
    earned = [ledger.of(keyed(i).peer) for i in range(4)]
    assert sum(each.stage_rounds for each in earned) > 7


def test_the_leaderboard_is_sorted_bounded_and_forgets_names_that_are_taken(run: Run) -> None:
    for number, name in ((1, "Ada"), (0, "Eve")):
        run.apply(PeerNamed(run.now, keyed(number).peer, name))
    board = recorded(run).leaderboard()
    assert [leader.name for leader in board.leaders] == ["Eve", "Ada"]
    assert (board.named, board.unnamed) == (2, 1)
    assert board.named_tokens + board.unnamed_tokens == sum(
        recorded(run).of(keyed(i).peer).stage_tokens for i in range(3)
    )
    assert [leader.name for leader in recorded(run).leaderboard(1).leaders] == ["Eve"]
    run.accept(Unname(keyed(0).peer))
    assert [leader.name for leader in recorded(run).leaderboard().leaders] == ["Ada"]
