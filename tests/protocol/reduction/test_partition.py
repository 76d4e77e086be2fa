"""Shares of reducers: the slowest upload ends as early as with hivemind's load balancing."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hivemind.averaging.load_balancing import load_balance_peers
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.reduction.partition import checkers_of, group_shares, partition, reducer_shares

UPLINKS = st.lists(st.sampled_from([0, 1, 3, 10, 100, 1414, 1 << 40]), min_size=1, max_size=9).filter(any)
ELEMENTS = 10_000_000


def slowest(uplinks: list[int], shares: list[float], ratio: float) -> float:
    """The longest upload of a member that has an uplink."""
    pairs = [(uplink, share) for uplink, share in zip(uplinks, shares, strict=True) if uplink]
    return max((1 - share + (len(uplinks) - 1) * ratio * share) / uplink for uplink, share in pairs)


@given(UPLINKS, st.sampled_from([1.0, 1.5, 4.0]))
def test_shares_are_exact_and_members_without_an_uplink_have_none(uplinks: list[int], ratio: float) -> None:
    shares = reducer_shares(uplinks, ratio)
    assert sum(shares) == 1
    assert all(share >= 0 for share in shares)
    assert all(share == 0 for uplink, share in zip(uplinks, shares, strict=True) if not uplink)
    ranges = partition(1000, shares)
    assert ranges[-1].last_chunk == 1000
    assert sum(map(len, ranges)) == 1000


@pytest.mark.filterwarnings("ignore")  # of scipy, about hivemind's way to call it
@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 3, 10, 100]), min_size=3, max_size=9).filter(any))
def test_no_upload_takes_longer_than_by_hiveminds_load_balancing(uplinks: list[int]) -> None:
    of_hivemind = [
        part / ELEMENTS for part in load_balance_peers(ELEMENTS, [float(each) for each in uplinks])
    ]
    ours = slowest(uplinks, list(map(float, reducer_shares(uplinks))), 1.0)
    assert ours <= slowest(uplinks, of_hivemind, 1.0) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("uplinks", "ratio", "shares"),
    [
        ([5], 4.0, ["1"]),
        ([7, 7], 1.0, ["1/2", "1/2"]),
        ([7, 7, 7, 0], 4.0, ["1/3", "1/3", "1/3", "0"]),
        # The slow one would be late with any share.
        ([1, 100, 100], 1.0, ["0", "1/2", "1/2"]),
    ],
)
def test_equal_uplinks_reduce_equal_parts(uplinks: list[int], ratio: float, shares: list[str]) -> None:
    assert reducer_shares(uplinks, ratio) == list(map(Fraction, shares))


@pytest.mark.parametrize(("uplinks", "ratio"), [([0, 0], 1.0), ([], 1.0), ([-1, 2], 1.0), ([1, 1], 0.5)])
def test_shares_need_an_uplink(uplinks: list[int], ratio: float) -> None:
    with pytest.raises(ValueError, match="no shares"):
        reducer_shares(uplinks, ratio)


def test_who_would_reduce_little_and_who_cannot_be_dialled_reduces_nothing() -> None:
    strong, weak = [250] * 4, [50] * 4
    shares = group_shares([True] * 8, [*strong, *weak], 3.3)
    assert shares == [Fraction(1, 4)] * 4 + [Fraction(0)] * 4
    assert group_shares([True] * 3, [0, 0, 0], 3.3) == [Fraction(1, 3)] * 3
    assert group_shares([False, True, True], [9, 1, 1], 3.3) == [0, Fraction(1, 2), Fraction(1, 2)]
    with pytest.raises(ValueError, match="no shares"):
        group_shares([False, False], [1, 1], 1.0)


@pytest.mark.parametrize("reducers", [2, 3, 5])
def test_each_reducer_checks_one_other_and_in_each_turn_another(reducers: int) -> None:
    shares = [Fraction(1)] * reducers
    shares.insert(1, Fraction(0))
    turns = {checkers_of(shares, [True] * len(shares), turn) for turn in range(10)}
    assert len(turns) == reducers - 1
    for checkers in turns:
        assert checkers[1] is None
        named = [each for each in checkers if each is not None]
        assert sorted(named) == [position for position, share in enumerate(shares) if share]
        assert all(checker != position for position, checker in enumerate(checkers))


def test_another_member_that_can_be_dialled_checks_a_single_reducer() -> None:
    one = [Fraction(0), Fraction(1), Fraction(0)]
    assert checkers_of(one, [True, True, True], 0) == (None, 0, None)
    assert checkers_of(one, [True, True, True], 1) == (None, 2, None)
    assert checkers_of(one, [False, True, False], 0) == (None, None, None)
