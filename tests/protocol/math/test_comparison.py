"""Each payload of a round is measured by one peer, which is not its owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.math.comparison import measured_position, next_of_kind
from protocol.types import PeerId

OWNERS = st.lists(st.integers(0, 99), min_size=1, unique=True).map(
    lambda found: [PeerId(f"peer-{each:02}") for each in sorted(found)]
)


@given(OWNERS)
def test_every_payload_is_measured_once_and_by_another_peer(owners: list[PeerId]) -> None:
    positions = [measured_position(owners, peer) for peer in owners]
    assert sorted(position for position in positions if position is not None) == list(range(len(owners)))
    if len(owners) > 1:
        assert all(owners[position or 0] != peer for position, peer in zip(positions, owners, strict=True))
    assert measured_position(owners, PeerId("a follower")) is None


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
