"""Which anchors stay on the disk: few, further and further apart, and none that was dropped before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.math.retention import LEVELS, is_kept


def kept(newest: int, every: int) -> set[int]:
    return {number for number in range(newest + 1) if is_kept(number, newest, every)}


def test_of_a_hundred_checkpoints() -> None:
    assert kept(100, 1) == {100, 99, 98, 96, 88, 80, 64}
    assert kept(400, 4) == {4 * each for each in kept(100, 1)}
    assert kept(403, 4) == kept(400, 4)


@given(st.integers(1, 2000), st.integers(1, 7))
def test_nothing_is_kept_that_was_dropped_before_and_there_are_few(newest: int, every: int) -> None:
    now, then = kept(newest, every), kept(newest + 1, every)
    assert then - now <= {newest + 1}
    assert len(now) <= LEVELS + 2
    if newest >= every << (LEVELS + 1):
        assert (every << LEVELS) - every < newest - min(now) < every << (LEVELS + 1)
