"""A constant batch stays while replicas come and go, and shrinks only where time is too short."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from coordinator.placement.rules import is_whole, largest_share
from coordinator.placement.tuning import batch_in_time, fair_shares, share_out
from protocol.algorithm.batch import batch_of, learning_rate_factor, with_shares
from protocol.spec.resolve import resolve
from protocol.types import Replica
from tests.support.coordinator_run import (
    ALL,
    Run,
    assert_samples_tile,
    attest,
    latest_reason,
    leave,
    measure,
    play_round,
    play_rounds,
    started_and_attested,
)

A, B, C, D, E = ALL[:5]
SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=20)


def constant(samples: int, replicas: int = 2, **more: Any) -> Run:
    """A run of full replicas with microbatches of 2 samples."""
    batch = {"grouping__batch": "constant", "grouping__global_batch": samples, "grouping__balance": True}
    return started_and_attested(replicas, **{**batch, **more})


def shares(run: Run) -> list[int]:
    return [run.spec.microbatches_of(each) for each in run.state.plans[-1].replicas]


class TestDivision:
    @given(SPEEDS, st.integers(0, 500))
    def test_fair_shares_keep_the_batch_within_the_largest_share(
        self, seconds: list[float], more: int
    ) -> None:
        total, count = len(seconds) + more, len(seconds)
        most = largest_share(total, count)
        found = fair_shares(seconds, total, [most] * count)
        assert sum(found) == total
        assert all(1 <= each <= most for each in found)

    @given(SPEEDS, st.integers(0, 200), st.data())
    def test_a_faster_replica_takes_no_less_than_before(
        self, seconds: list[float], more: int, data: st.DataObject
    ) -> None:
        total = len(seconds) + more
        faster = data.draw(st.integers(0, len(seconds) - 1))
        after = [each / 2 if i == faster else each for i, each in enumerate(seconds)]
        before, now = (fair_shares(each, total, [total] * len(seconds)) for each in (seconds, after))
        assert now[faster] >= before[faster]

    @given(SPEEDS, st.integers(0, 200))
    @example([6.0, 6.0, 6.0, 6.0, 1.1, 0.5, 0.5], 80)  # several replicas would end together
    def test_a_larger_batch_takes_no_microbatch_from_any_replica(
        self, seconds: list[float], more: int
    ) -> None:
        total, count = len(seconds) + more, len(seconds)
        small, large = (fair_shares(seconds, n, [total + 1] * count) for n in (total, total + 1))
        assert all(one <= other for one, other in zip(small, large, strict=True))


class TestTime:
    """`longest_phase` of H = 2 steps."""

    @staticmethod
    def fitting(seconds: Sequence[float], longest: float, present: int = 0, **more: Any) -> int:
        batch = {"grouping.batch": "constant", "grouping.global_batch": 64, "inner.steps": 2}
        spec = resolve("nano", overrides={**batch, "grouping.longest_phase": longest, **more})
        return batch_in_time(spec, seconds, [32] * len(seconds), present)

    def test_the_whole_batch_is_kept_while_there_is_time_for_it(self) -> None:
        assert self.fitting([1.0, 1.0], 32.0) == 32
        assert self.fitting([1.0, 1.0], 0.0) == 32
        assert self.fitting([0.0, 1.0], 2.0) == 32, "the speed of a replica is not known"

    def test_a_slow_swarm_trains_what_fits(self) -> None:
        assert self.fitting([1.0, 2.0], 20.0) == 10 + 5
        assert self.fitting([1.0, 2.0], 20.0, **{"grouping.balance": False}) == 5 + 5
        assert self.fitting([100.0, 100.0], 20.0) == 2, "one microbatch of each replica"

    def test_a_smaller_batch_stays_while_speeds_change_little(self) -> None:
        assert self.fitting([1.0, 2.0], 20.0, present=16) == 16
        assert self.fitting([1.0, 2.0], 20.0, present=20) == 15
        assert self.fitting([0.5, 0.5], 32.0, present=16) == 32

    @given(SPEEDS, st.floats(0.1, 1000))
    def test_the_batch_never_takes_longer_than_allowed(self, seconds: list[float], longest: float) -> None:
        spec = resolve(
            "nano",
            overrides={
                "grouping.batch": "constant",
                "grouping.global_batch": 2 * 64,
                "grouping.longest_phase": longest,
                "inner.steps": 1,
            },
        )
        count = len(seconds)
        given_replicas = [Replica(i, (), ()) for i in range(count)]
        limits = [largest_share(64, count)] * count
        shared, _ = share_out(spec, given_replicas, seconds, limits, are_changed=True)
        taken = [spec.microbatches_of(each) for each in shared]
        assert is_whole(spec, shared)
        assume(sum(taken) < 64)
        assert all(n == 1 or n * s <= longest * (1 + 1e-9) for n, s in zip(taken, seconds, strict=True))
        assert learning_rate_factor(spec, shared) == pytest.approx(sqrt(sum(taken) / 64))


class TestChurn:
    def test_the_first_plan_divides_the_batch_equally(self) -> None:
        assert shares(constant(22, 2)) == [6, 5]

    def test_those_that_stay_take_over_what_others_trained(self) -> None:
        run = constant(48, 4)
        play_rounds(run, 2)
        assert shares(run) == [6, 6, 6, 6]
        for peer in (C, D):
            leave(run, peer)
            play_round(run)
        play_rounds(run, 2)
        assert shares(run) == [12, 12]
        run.accept(E.join(run.spec))
        attest(run, E)
        play_rounds(run, 2)
        assert shares(run) == [8, 8, 8]
        assert_samples_tile(run, run.state.current_round)
        assert {batch_of(run.spec, plan.replicas) for plan in run.state.plans} == {48}
        weight = 24 / run.spec.inner.microbatches
        assert all(sum(each.weight for each in plan.replicas) == weight for plan in run.state.plans)
        assert "every replica takes 8 of the 24 microbatches of a step" in latest_reason(run)

    def test_the_last_replica_takes_the_whole_batch_at_once(self) -> None:
        run = constant(48, 4)
        for peer in (A, B, C, D):
            measure(run, peer, microbatch_seconds=1.0)
        play_rounds(run, 2)
        for peer in (B, C, D):
            leave(run, peer)
        play_rounds(run, 2)
        assert shares(run) == [24]

    def test_a_newcomer_that_claims_to_be_fast_takes_an_equal_share_at_most(self) -> None:
        run = constant(48, 2)
        for peer in (A, B):
            measure(run, peer, 1e6)
        play_rounds(run, 2)
        run.accept(C.join(run.spec))
        measure(run, C, 1e12)
        attest(run, C)
        play_round(run)
        assert shares(run) == [8, 8, 8]

    def test_the_batch_of_other_replicas_is_no_reason_to_keep_it(self) -> None:
        more = {"grouping.global_batch": 64, "grouping.longest_phase": 20.0, "inner.steps": 1}
        spec = resolve("nano", overrides={"grouping.batch": "constant", **more})
        present = with_shares(spec, [Replica(0, (), ()), Replica(1, (), ())], [16, 6])
        kept, _ = share_out(spec, present, [1.0, 20.0], [32, 32], are_changed=False)
        changed, _ = share_out(spec, present, [1.0, 20.0], [32, 32], are_changed=True)
        assert [sum(map(spec.microbatches_of, each)) for each in (kept, changed)] == [22, 21]

    def test_a_smaller_batch_is_told_with_its_learning_rate(self) -> None:
        spec = resolve(
            "nano",
            overrides={
                "grouping.batch": "constant",
                "grouping.global_batch": 64,
                "grouping.longest_phase": 16.0,
            },
        )
        present = with_shares(spec, [Replica(0, (), ()), Replica(1, (), ())], [16, 16])
        shared, reasons = share_out(spec, present, [1.0, 1.0], [32, 32], are_changed=False)
        assert [spec.microbatches_of(each) for each in shared] == [8, 8]
        assert reasons[-1] == (
            "the batch has 32 samples instead of 64, as many as fit in inner phases of 16 s, and the "
            "learning rate is 0.71 times as high"
        )
