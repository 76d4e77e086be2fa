"""The payloads with which a member compares the one that it measures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.agreement.comparing import next_of_kind


@given(st.lists(st.sampled_from([True, False, None]), min_size=1), st.data())
def test_the_pairs_are_others_of_the_same_and_of_the_other_kind(
    is_full: list[bool | None], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(is_full) - 1))
    kind = is_full[position]
    others = [each for at, each in enumerate(is_full) if at != position and each is not None]
    for alike in (True, False):
        found = next_of_kind(is_full, position, alike)
        possible = [] if kind is None else [each for each in others if (each == kind) == alike]
        assert (found is None) == (not possible)
        assert found is None or (found != position and (is_full[found] == kind) == alike)


def test_the_pair_is_the_next_in_canonical_order() -> None:
    assert next_of_kind([True, False, True, False], 2, alike=True) == 0
    assert next_of_kind([True, False, True, False], 2, alike=False) == 3
