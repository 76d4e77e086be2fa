"""Which snapshot of the embedding is active in a round."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from protocol.math.embedding_snapshot import LAG, active_snapshot, needed_snapshots


def test_a_snapshot_is_active_from_one_inner_phase_after_its_commit_until_the_next() -> None:
    assert [active_snapshot(each, 5) for each in range(1, 15)] == [0] * 6 + [5] * 5 + [10] * 3
    assert [active_snapshot(each, 1) for each in range(1, 6)] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("every", [1, 2, 7])
def test_no_round_uses_a_snapshot_before_it_was_fetched_or_much_too_old(every: int) -> None:
    for round_number in range(1, 50):
        taken = active_snapshot(round_number, every)
        assert taken % every == 0
        assert taken == 0 or taken + LAG < round_number
        assert round_number - 1 - taken < every + LAG


def test_a_rollback_round_has_a_snapshot_that_is_active_at_once_until_a_later_one_is() -> None:
    # Round 7 restores a former round: the snapshot of round 5 may be of a discarded TE.
    active = [active_snapshot(each, 5, {7}) for each in range(6, 14)]
    assert active == [0, 5, 7, 7, 7, 7, 10, 10]
    # One right after a snapshot round, whose snapshot never becomes active.
    assert [active_snapshot(each, 5, {6}) for each in range(5, 9)] == [0, 0, 6, 6]
    assert [active_snapshot(each, 5, {5, 6}) for each in range(5, 9)] == [0, 5, 6, 6]


@pytest.mark.parametrize("rollbacks", [(), {3}, {6}, {4, 5, 11}])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_needed_snapshots_are_those_that_later_rounds_use(every: int, rollbacks: Collection[int]) -> None:
    for round_number in range(1, 25):
        so_far = {each for each in rollbacks if each < round_number}
        used = {active_snapshot(each, every, so_far) for each in range(round_number, round_number + 30)}
        expected = tuple(sorted(each for each in used if each < round_number))
        assert needed_snapshots(round_number, every, rollbacks) == expected
