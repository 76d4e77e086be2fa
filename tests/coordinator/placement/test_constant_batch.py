"""A constant batch stays while replicas come and go, and shrinks only where time is too short."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.placement.rules import largest_share
from coordinator.placement.tuning import fair_shares
from protocol.group.batch import batch_of
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
