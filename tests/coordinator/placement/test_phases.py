"""How long replicas take, and offers that come sooner than that allows."""

from __future__ import annotations

from math import inf

import pytest

from coordinator.placement.phases import FASTER, expected_seconds, half_time
from coordinator.run.state.commands import Await, Heartbeat, Offer, Report, Start
from coordinator.run.state.state import KEPT_PHASES
from protocol.errors import ErrorCode
from protocol.spec.fixed import LEAST_SHARE
from protocol.types import Role
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_run import Run, joined_run, measure, settle

A, B, C = (keyed(i) for i in range(3))


@pytest.fixture
def run() -> Run:
    """Three full replicas of one stage."""
    return trio()


def trio(**overrides: object) -> Run:
    return joined_run(spec_of(1, 3, rounds=20, **overrides), *[Role.REPLICA] * 3)


def rounds(run: Run, *seconds: float, hosts: tuple[Keyed, ...] = (A, B, C)) -> None:
    """Play one round for each of `seconds`: all replicas offer after that time."""
    for each in seconds:
        run.now += each
        settle(run, 0, run.state.current_round, hosts)


def expected(run: Run, peer: Keyed) -> float:
    assignment = run.state.assignment(peer.peer, run.state.current_round)
    assert assignment is not None
    return expected_seconds(run.state, assignment.replica)


def offer(run: Run, peer: Keyed, weight: float = 1.0) -> Offer:
    return Offer(peer.peer, peer.payload(run.spec, 0, run.state.current_round, weight=weight))


class TestExpectation:
    def test_nothing_is_expected_before_anything_is_known(self, run: Run) -> None:
        assert expected(run, A) == inf

    def test_before_the_first_phase_the_measured_speed_tells(self, run: Run) -> None:
        measure(run, A, flops=1e6)
        slow = expected(run, A)
        measure(run, A, flops=1e7)
        assert expected(run, A) == pytest.approx(slow / 10)

    def test_then_the_median_of_the_last_phases(self, run: Run) -> None:
        rounds(run, 30, 10, 12)
        assert expected(run, A) == pytest.approx(12)
        rounds(run, *[20] * KEPT_PHASES)
        assert expected(run, A) == pytest.approx(20)

    def test_a_part_of_the_steps_stands_for_a_whole_phase(self, run: Run) -> None:
        run.now += 5
        run.accept(offer(run, A, weight=0.5))
        assert expected(run, A) == pytest.approx(10)

    def test_a_replica_that_withholds_later_than_it_used_to_offer_has_become_slower(self, run: Run) -> None:
        rounds(run, 10)
        for _ in range(2):
            number = run.state.current_round
            run.now += 5
            for peer in (A, B, C):
                run.accept(Await(peer.peer, 0, number, epoch=1))
        assert expected(run, A) == pytest.approx(5 / LEAST_SHARE)

    def test_a_replica_that_withholds_at_once_shows_nothing(self, run: Run) -> None:
        rounds(run, 10)
        run.now += 0.1
        run.accept(Await(A.peer, 0, 2, epoch=1))
        assert expected(run, A) == pytest.approx(10)

    def test_an_absence_of_the_coordinator_is_not_measured(self, run: Run) -> None:
        run.now += 500
        run.accept(Start())
        for peer in (A, B, C):
            run.accept(Heartbeat(peer.peer, 1, 0))
        rounds(run, 0)
        assert expected(run, A) == inf


class TestHalf:
    def test_the_time_by_which_half_of_the_weight_is_reached(self) -> None:
        assert half_time([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)], 3.0) == 2.0
        assert half_time([(1.0, 1.0), (2.0, 1.0)], 4.0) == 2.0
        assert half_time([(1.0, 1.0)], 4.0) == inf


class TestEarlyOffers:
    def test_far_too_early_an_offer_is_refused_with_both_times_and_then_accepted(self, run: Run) -> None:
        rounds(run, 8, 9)
        run.now += 1.5
        refusal = run.refuse(offer(run, A), ErrorCode.OFFER_TOO_EARLY)
        assert "1.5 s after round 3 began" in refusal.cause
        assert "at least 2 s" in refusal.cause
        assert "again in 0.5 s" in refusal.remedy
        assert not run.state.strikes
        run.now += 0.5
        run.accept(offer(run, A))

    def test_a_machine_may_become_faster_by_a_factor_at_once(self, run: Run) -> None:
        rounds(run, 8, 8, 8 / FASTER, 8 / FASTER**2)
        assert run.state.current_round == 5

    def test_a_small_part_takes_a_small_part_of_the_time(self, run: Run) -> None:
        rounds(run, 8, 8)
        run.now += 8 / FASTER / 2
        run.accept(offer(run, A, weight=0.5))
        run.refuse(offer(run, B), ErrorCode.OFFER_TOO_EARLY)

    def test_the_first_phase_which_contains_imports_says_little(self, run: Run) -> None:
        rounds(run, 60, 0.2)
        assert run.state.current_round == 3

    def test_the_measured_speed_counts_until_phases_are_known(self, run: Run) -> None:
        measure(run, A, flops=1e7)
        phase = expected(run, A)
        run.now += phase / FASTER / 2
        run.refuse(offer(run, A), ErrorCode.OFFER_TOO_EARLY)
        run.now += phase / FASTER / 2
        run.accept(offer(run, A))

    def test_a_wrongly_measured_speed_costs_a_bounded_wait(self, run: Run) -> None:
        measure(run, A, flops=1.0)
        run.now += run.spec.timing.match_window
        run.accept(offer(run, A))

    def test_steps_that_overlapped_with_the_round_before_need_no_time_in_this_one(self) -> None:
        run = trio(inner__steps=20, outer__overlap=15)
        rounds(run, 20, 20)
        run.now += 20 * (5 / 20) / FASTER - 0.1
        run.refuse(offer(run, A), ErrorCode.OFFER_TOO_EARLY)
        run.now += 0.1
        run.accept(offer(run, A))

    def test_who_withholds_first_may_offer_no_sooner(self, run: Run) -> None:
        rounds(run, 8, 8)
        run.accept(Await(A.peer, 0, 3, epoch=1))
        run.refuse(offer(run, A), ErrorCode.OFFER_TOO_EARLY)

    def test_a_report_is_no_way_to_offer_sooner(self, run: Run) -> None:
        rounds(run, 8, 8)
        run.accept(Report(A.peer, 0, 3, (A.payload(run.spec, 0, 3),)))
        assert not run.state.round_of(0, 3).offers
        run.now += 8
        run.accept(Report(A.peer, 0, 3, (A.payload(run.spec, 0, 3),)))
        assert run.state.round_of(0, 3).offers.keys() == {A.peer}
