"""How long a round waits, and for how long a group may gather: from what was measured, within bounds."""

from __future__ import annotations

import pytest

from coordinator.rounds.deadlines import LEAST_GATHER_SECONDS, closes_at, decide_seconds, gather_seconds
from coordinator.state.commands import Attest, Heartbeat, Offer, Report, Start, Tick
from coordinator.state.state import KEPT_ROUNDS
from protocol.types import ExchangeGroup
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import Run

A, B = keyed(0), keyed(1)
ROUNDS = 30


@pytest.fixture
def run() -> Run:
    run = Run(spec_of(1, 2, rounds=ROUNDS))
    run.accept(Start())
    for peer in (A, B):
        run.accept(peer.join(run.spec))
    return run


def passes(run: Run, seconds: float) -> None:
    end = run.now + seconds
    while run.now < end:
        run.now = min(end, run.now + 1)
        for peer in (A, B):
            run.accept(Heartbeat(peer.peer, 1, 0))
        run.accept(Tick())


def offers(run: Run, *peers: Keyed) -> None:
    for peer in peers:
        run.accept(Offer(peer.peer, peer.payload(run.spec, 0, run.state.current_round)))


def one_round(run: Run, gathered_in: float) -> None:
    number = run.state.current_round
    payloads = tuple(peer.payload(run.spec, 0, number) for peer in (A, B))
    offers(run, A, B)
    run.accept(Report(A.peer, 0, number, payloads))
    passes(run, gathered_in)
    run.accept(Report(B.peer, 0, number, payloads))
    for peer in (A, B):
        run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number)))


class TestClosing:
    def test_nothing_closes_before_the_first_offer(self, run: Run) -> None:
        passes(run, 10 * run.spec.timing.match_window)
        assert closes_at(run.state, run.spec) is None
        assert run.state.current_round == 1

    @pytest.mark.parametrize(
        ("inner_phase", "wait"),
        [(1.0, 5.0), (60.0, 60.0), (1000.0, 120.0)],
        ids=["at least the least window", "as long as the first took", "at most the match window"],
    )
    def test_the_slow_may_take_as_much_longer_as_the_first_took(
        self, run: Run, inner_phase: float, wait: float
    ) -> None:
        passes(run, inner_phase)
        offers(run, A)
        assert closes_at(run.state, run.spec) == pytest.approx(run.now + wait)
        passes(run, wait - 0.5)
        assert run.state.round_of(0, 1).group is None
        passes(run, 0.5)
        assert run.state.round_of(0, 1).group is not None

    def test_every_round_is_measured_from_its_own_beginning(self, run: Run) -> None:
        passes(run, 1000)
        one_round(run, gathered_in=0)
        passes(run, 10)
        offers(run, A)
        assert closes_at(run.state, run.spec) == pytest.approx(run.now + 10)

    def test_a_restarted_coordinator_waits_anew(self, run: Run) -> None:
        offers(run, A)
        run.now += 3600
        run.accept(Start())
        run.accept(Tick())
        assert closes_at(run.state, run.spec) == run.now + run.spec.timing.least_window
        assert run.state.round_of(0, 1).group is None


class TestGathering:
    def test_before_anything_is_measured_it_may_take_as_long_as_the_spec_says(self, run: Run) -> None:
        offers(run, A, B)
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert group.seconds == run.spec.timing.fetch

    def test_then_three_times_as_long_per_byte_as_the_slowest_of_the_last_rounds(self, run: Run) -> None:
        one_round(run, gathered_in=3)
        one_round(run, gathered_in=1)
        assert gather_seconds(run.state, run.spec, 0, 200) == pytest.approx(9)
        assert gather_seconds(run.state, run.spec, 0, 400) == pytest.approx(18)
        assert gather_seconds(run.state, run.spec, 0, 10**9) == run.spec.timing.fetch
        assert gather_seconds(run.state, run.spec, 0, 1) == LEAST_GATHER_SECONDS
        assert gather_seconds(run.state, run.spec, 1, 1) == run.spec.timing.fetch

    def test_rounds_of_long_ago_are_forgotten(self, run: Run) -> None:
        one_round(run, gathered_in=3)
        for _ in range(KEPT_ROUNDS):
            one_round(run, gathered_in=0.5)
        assert gather_seconds(run.state, run.spec, 0, 200) == LEAST_GATHER_SECONDS

    def test_an_exchange_interrupted_by_a_restart_is_not_measured(self, run: Run) -> None:
        number = run.state.current_round
        payloads = tuple(peer.payload(run.spec, 0, number) for peer in (A, B))
        offers(run, A, B)
        run.now += 3
        run.accept(Start())
        run.accept(Report(A.peer, 0, number, payloads))
        assert gather_seconds(run.state, run.spec, 0, 200) == run.spec.timing.fetch

    def test_the_decision_follows_the_gathering_after_the_time_that_the_spec_leaves_for_reports(
        self, run: Run
    ) -> None:
        timing = run.spec.timing
        assert decide_seconds(run.spec, ExchangeGroup("g", (), timing.fetch)) == timing.decide
        one_round(run, gathered_in=0.5)
        offers(run, A, B)
        run.accept(Report(A.peer, 0, 2, tuple(peer.payload(run.spec, 0, 2) for peer in (A, B))))
        slack = timing.decide - timing.fetch
        passes(run, LEAST_GATHER_SECONDS + slack - 0.5)
        assert run.state.current_round == 2
        passes(run, 0.5)
        assert run.state.current_round == 3
