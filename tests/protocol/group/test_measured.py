"""Each payload of a round is measured by one peer, which is not its owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.group.measured import measured_position
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
