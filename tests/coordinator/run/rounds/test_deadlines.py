"""How long a round waits, and for how long a group may gather: from what was measured, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.remembered import closing_time
from coordinator.run.rounds.deadlines import (
    FIRST_SECONDS,
    LEAST_GATHER_SECONDS,
    closes_at,
    decide_seconds,
    gather_seconds,
)
from coordinator.run.state.commands import Attest, Heartbeat, Leave, Offer, Report, Start, Tick
from coordinator.run.state.state import KEPT_ROUNDS
from protocol.spec.fixed import LEAST_WINDOW_SECONDS
from protocol.types import ExchangeGroup
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import Run

A, B, C, D, E = PEERS = [keyed(i) for i in range(5)]
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


def reports(run: Run, *peers: Keyed) -> None:
    number = run.state.current_round
    payloads = tuple(peer.payload(run.spec, 0, number) for peer in peers)
    for peer in peers:
        run.accept(Report(peer.peer, 0, number, payloads))


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
        assert closes_at(run.state) is None
        assert run.state.current_round == 1

    @pytest.mark.parametrize(
        ("inner_phase", "wait"),
        [(1.0, FIRST_SECONDS), (60.0, 60.0), (1000.0, 120.0)],
        ids=["one that starts is waited for", "as long as the first took", "at most the match window"],
    )
    def test_the_slow_may_take_as_much_longer_as_the_first_took(
        self, run: Run, inner_phase: float, wait: float
    ) -> None:
        passes(run, inner_phase)
        offers(run, A)
        assert closes_at(run.state) == pytest.approx(run.now + wait)
        passes(run, wait - 0.5)
        assert run.state.round_of(0, 1).group is None
        passes(run, 0.5)
        assert run.state.round_of(0, 1).group is not None

    def test_every_round_is_measured_from_its_own_beginning(self, run: Run) -> None:
        passes(run, 1000)
        one_round(run, gathered_in=0)
        passes(run, 10)
        offers(run, A)
        assert closes_at(run.state) == pytest.approx(run.now + 10)

    def test_a_restarted_coordinator_waits_anew(self, run: Run) -> None:
        offers(run, A)
        run.now += 3600
        run.accept(Start())
        run.accept(Tick())
        assert closes_at(run.state) == run.now + FIRST_SECONDS
        assert run.state.round_of(0, 1).group is None

    def test_in_later_rounds_all_have_started(self, run: Run) -> None:
        passes(run, 1)
        one_round(run, gathered_in=0)
        passes(run, 1)
        offers(run, A)
        assert closes_at(run.state) == run.now + LEAST_WINDOW_SECONDS


TIMES = st.floats(0, 1000, allow_nan=False)


class TestMinorities:
    """By weight, fewer than half of the replicas neither shorten nor stretch the window."""

    @pytest.fixture
    def five(self) -> Run:
        run = Run(spec_of(1, 5, rounds=ROUNDS))
        run.accept(Start())
        for peer in PEERS:
            run.accept(peer.join(run.spec))
        return run

    def test_two_early_offers_of_five_start_no_window(self, five: Run) -> None:
        offers(five, D, E)
        assert closes_at(five.state) is None
        five.now += 40
        offers(five, A)
        assert closes_at(five.state) == five.now + 40

    def test_early_offers_and_the_fastest_do_not_close_before_half_are_expected(self, five: Run) -> None:
        for _ in range(2):
            five.now += 40
            offers(five, *PEERS)
            reports(five, *PEERS)
        began = five.state.began_at
        five.now += 10
        offers(five, D, E, A)
        assert closes_at(five.state) == began + 40 + 40

    def test_while_most_are_missing_a_round_closes_later_by_the_longest_wait(self, five: Run) -> None:
        five.now += 40
        offers(five, *PEERS)
        reports(five, *PEERS)
        began = five.state.began_at
        five.now += 40
        offers(five, A)
        assert closes_at(five.state) == began + 40 + 40 + five.spec.timing.match_window
        offers(five, B, C)
        assert closes_at(five.state) == began + 40 + 40

    @settings(max_examples=50, deadline=None)
    @given(
        honest=st.lists(TIMES, min_size=3, max_size=3),
        others=st.lists(TIMES | st.none(), min_size=2, max_size=2),
        expected=st.lists(st.none() | TIMES, min_size=2, max_size=2),
    )
    def test_whatever_two_of_five_do_the_window_is_one_of_the_honest(
        self, honest: list[float], others: list[float | None], expected: list[float | None]
    ) -> None:
        """With any answers, or none, in this round, and any times of their earlier phases."""
        run = Run(spec_of(1, 5, rounds=ROUNDS))
        run.accept(Start())
        for peer in PEERS:
            run.accept(peer.join(run.spec))
        began, index = run.state.began_at, [run.state.assignment(p.peer, 1).replica.index for p in PEERS]
        times = zip(index, [*honest, *others], strict=True)
        answers = {i: began + seconds for i, seconds in times if seconds is not None}
        phases = [*((seconds,) for seconds in honest), *(() if e is None else (e,) for e in expected)]
        state = replace(
            run.state,
            opened_at=min(answers.values()),
            answered=answers,
            phase_seconds={i: each for i, each in zip(index, phases, strict=True) if each},
        )

        least = LEAST_WINDOW_SECONDS if len(answers) == len(index) else FIRST_SECONDS

        def window(phase: float) -> float:
            return began + phase + min(max(phase, least), run.spec.timing.match_window)

        closes = closes_at(state)
        assert closes is not None
        assert window(min(honest)) <= closes <= window(max(honest))

    def test_the_time_of_heartbeats_is_that_of_the_rule(self, five: Run) -> None:
        remembered = closing_time()
        for peer in (D, E, A, B):
            five.now += 5
            offers(five, peer)
            five.accept(Heartbeat(peer.peer, 1, 0))
            assert remembered.of(five.state) == closes_at(five.state)
        five.accept(Leave(C.peer, "interrupted"))
        assert remembered.of(five.state) == closes_at(five.state)


class TestGathering:
    def test_before_anything_is_measured_it_may_take_as_long_as_the_spec_says(self, run: Run) -> None:
        offers(run, A, B)
        group = run.state.round_of(0, 1).group
        assert group is not None
        assert group.seconds == run.spec.timing.fetch

    def test_then_three_times_as_long_per_byte_as_the_slowest_of_the_last_rounds(self, run: Run) -> None:
        one_round(run, gathered_in=3)
        one_round(run, gathered_in=1)
        assert gather_seconds(run.state, 0, 200) == pytest.approx(9)
        assert gather_seconds(run.state, 0, 400) == pytest.approx(18)
        assert gather_seconds(run.state, 0, 10**9) == run.spec.timing.fetch
        assert gather_seconds(run.state, 0, 1) == LEAST_GATHER_SECONDS
        assert gather_seconds(run.state, 1, 1) == run.spec.timing.fetch

    def test_rounds_of_long_ago_are_forgotten(self, run: Run) -> None:
        one_round(run, gathered_in=3)
        for _ in range(KEPT_ROUNDS):
            one_round(run, gathered_in=0.5)
        assert gather_seconds(run.state, 0, 200) == LEAST_GATHER_SECONDS

    def test_an_exchange_interrupted_by_a_restart_is_not_measured(self, run: Run) -> None:
        number = run.state.current_round
        payloads = tuple(peer.payload(run.spec, 0, number) for peer in (A, B))
        offers(run, A, B)
        run.now += 3
        run.accept(Start())
        run.accept(Report(A.peer, 0, number, payloads))
        assert gather_seconds(run.state, 0, 200) == run.spec.timing.fetch

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
