"""Sample ranges tile the ordinals, and the keyed order of a source is a permutation per epoch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.permutation import window_of
from protocol.math.sampling import next_first_sample, sample_range
from protocol.run_files.resolve import resolve
from protocol.types import Member, PeerId, Plan, Replica, StageRange

TEN = resolve("nano", overrides={"inner.steps": 1, "inner.microbatches": 10, "inner.microbatch_size": 1})
"""Ten samples for each replica and round, unless the plan says otherwise."""


def _plan(shares: Mapping[int, int], first_sample: int = 0, from_round: int = 0, epoch: int = 0) -> Plan:
    """`shares`: microbatches by index of the replica, 0 as the spec says."""
    replicas = tuple(
        Replica(index, (Member(PeerId(f"peer-{index}"), StageRange(0, 2), ""),), (), 1.0, share)
        for index, share in shares.items()
    )
    return Plan(epoch, from_round, first_sample, replicas, "a plan")


_SHARES = st.dictionaries(st.integers(0, 20), st.integers(0, 7), min_size=1, max_size=5)
_PHASES = st.lists(st.tuples(_SHARES, st.integers(0, 4)), min_size=1, max_size=5)


@given(phases=_PHASES, start=st.integers(0, 100))
def test_successive_plans_assign_every_ordinal_exactly_once(
    phases: list[tuple[dict[int, int], int]], start: int
) -> None:
    assigned: list[int] = []
    first_sample, from_round = start, 3
    for epoch, (shares, rounds) in enumerate(phases):
        plan = _plan(shares, first_sample, from_round, epoch)
        for round_number in range(from_round, from_round + rounds):
            for index in shares:
                assigned += sample_range(plan, TEN, round_number, index)
        from_round += rounds
        first_sample = next_first_sample(plan, TEN, from_round)
    assert sorted(assigned) == list(range(start, start + len(assigned)))
    assert first_sample == start + len(assigned)


def test_blocks_follow_the_order_of_the_plan_and_not_the_numbering() -> None:
    plan = _plan({7: 0, 2: 3}, first_sample=100, from_round=5)
    assert sample_range(plan, TEN, 5, 7) == range(100, 110)
    assert sample_range(plan, TEN, 5, 2) == range(110, 113)
    assert sample_range(plan, TEN, 6, 7) == range(113, 123)


def test_a_round_before_the_plan_or_an_unknown_replica_is_refused() -> None:
    plan = _plan({0: 0}, from_round=5)
    with pytest.raises(ValueError, match="lies before"):
        sample_range(plan, TEN, 4, 0)
    with pytest.raises(ValueError, match="lies before"):
        next_first_sample(plan, TEN, 4)
    with pytest.raises(ValueError, match="no replica 3"):
        sample_range(plan, TEN, 5, 3)


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 5))
def test_every_epoch_visits_every_window_once(size: int, seed: int, epoch: int) -> None:
    places = [window_of(ordinal, size, seed) for ordinal in range(epoch * size, (epoch + 1) * size)]
    assert {number for number, _ in places} == {epoch}
    assert sorted(index for _, index in places) == list(range(size))


@given(size=st.integers(1, 2**60), ordinal=st.integers(0, 2**62), seed=st.integers(0, 2**63 - 1))
def test_huge_sources_need_no_table(size: int, ordinal: int, seed: int) -> None:
    epoch, index = window_of(ordinal, size, seed)
    assert epoch == ordinal // size
    assert 0 <= index < size


def test_seeds_and_epochs_give_different_orders() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [window_of(epoch * 100 + i, 100, seed)[1] for i in range(100)]

    orders = [order(0, 0), order(0, 1), order(1, 0), list(range(100))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_the_order_is_fixed_for_all_time() -> None:
    """Peers of one run must agree: a change of these numbers is a change of protocol."""
    assert [window_of(ordinal, 10, 0)[1] for ordinal in range(10)] == [5, 0, 7, 3, 1, 8, 9, 4, 6, 2]


@pytest.mark.parametrize(("ordinal", "size"), [(-1, 5), (0, 0)])
def test_impossible_places_are_refused(ordinal: int, size: int) -> None:
    with pytest.raises(ValueError, match="there is no sample"):
        window_of(ordinal, size, 0)
