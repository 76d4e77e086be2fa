"""Groups in few bytes: packed messages, and payloads by their positions."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import PayloadDescriptor, PeerId
from protocol.wire.groups import (
    MOST_UNPACKED_BYTES,
    at_positions,
    group_digest,
    pack,
    positions_of,
    unpack,
)


def payload(number: int, nbytes: int = 1) -> PayloadDescriptor:
    owner = PeerId(f"peer-{number:03d}")
    return PayloadDescriptor("run", 0, 1, owner, "a", "c", 1.0, nbytes, "b" * 64, bytes([number % 256] * 64))


def refusal_of(data: bytes) -> HetnodeError:
    with pytest.raises(HetnodeError) as error:
        unpack(pb.MatchReply, data)
    assert error.value.code is ErrorCode.BAD_REQUEST
    return error.value


def test_a_packed_message_is_the_message() -> None:
    message = pb.MatchReply(group_id="g", seconds=2.0)
    assert unpack(pb.MatchReply, pack(message)) == message


def test_packed_bytes_that_are_no_whole_message_are_refused() -> None:
    whole = pack(pb.MatchReply(group_id="g" * 100))
    for data in (b"", b"x", whole[:-1], whole + b"x", zlib.compress(b"\xff")):
        refusal_of(data)


def test_few_bytes_that_unpack_to_many_are_refused() -> None:
    assert "too long" in refusal_of(zlib.compress(bytes(MOST_UNPACKED_BYTES + 1))).cause


@given(st.integers(0, 40), st.data())
def test_positions_name_payloads_of_the_group(size: int, data: st.DataObject) -> None:
    group = tuple(map(payload, range(size)))
    chosen = data.draw(st.sets(st.sampled_from(group))) if group else set()
    positions = positions_of(group, chosen)
    assert positions is not None
    assert len(positions) == (size + 7) // 8
    assert at_positions(group, positions) == tuple(each for each in group if each in chosen)


@given(st.integers(0, 40), st.binary(max_size=8))
def test_any_bytes_are_positions_or_refused(size: int, positions: bytes) -> None:
    group = tuple(map(payload, range(size)))
    try:
        found = at_positions(group, positions)
    except HetnodeError:
        return
    assert positions_of(group, found) == positions


def test_a_payload_outside_the_group_has_no_position() -> None:
    group = payload(0), payload(1)
    assert positions_of(group, [payload(2)]) is None
    assert positions_of(group, [payload(1, nbytes=2)]) is None


def test_the_digest_names_the_payloads_in_their_order() -> None:
    one, other = payload(0), payload(1)
    assert len({group_digest(each) for each in ([one], [other], [one, other], [other, one])}) == 4
