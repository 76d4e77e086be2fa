"""Records on the wire: what is sent comes back equal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.types import (
    Aborted,
    Capacity,
    Committed,
    CommittedResult,
    Decision,
    Dialer,
    DType,
    ExchangeGroup,
    FrameId,
    FrameKind,
    Link,
    ManifestEntry,
    Member,
    MemberLine,
    PayloadDescriptor,
    PeerId,
    Plan,
    Rejection,
    Replica,
    ResultClaim,
    Role,
    RolledBack,
    StageRange,
    TensorHeader,
)
from protocol.wire.convert.payloads import (
    DESCRIPTOR,
    GROUP,
    RESULT_CLAIM,
    decision_from_pb,
    decision_to_pb,
    rejection_to_pb,
    rejections_from_pb,
)
from protocol.wire.convert.plans import CAPACITY, LINK, PEER_RECORD, PLAN, STAGE_RANGE
from protocol.wire.framing import FRAME_ID, TENSOR_HEADER, frame_header_from_pb, frame_header_to_pb

printable = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
words = st.text(printable, min_size=1, max_size=20)


peers = st.integers(0, 10_000).map(lambda n: PeerId(f"peer{n}"))


endpoints = st.just("") | st.integers(1, 65535).map(lambda port: f"10.0.0.1:{port}")


naturals = st.integers(0, 2**32 - 1)


hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)


stage_ranges = st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda t: StageRange(t[0], sum(t)))


capacities = st.builds(Capacity, words, st.integers(0, 2**63 - 1), naturals)


records = st.builds(
    PeerRecord, peers, naturals, st.sampled_from(Role), capacities, endpoints, st.none() | stage_ranges
)


links = st.builds(Link, st.integers(0, 2**15), st.sampled_from(Dialer))


weights = st.floats(min_value=0, max_value=1e6, exclude_min=True)


frame_ids = st.builds(FrameId, naturals, naturals, naturals, naturals, st.sampled_from(FrameKind))


headers = st.builds(
    TensorHeader,
    words,
    st.sampled_from(DType),
    st.lists(st.integers(1, 2**31 - 1), max_size=4).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages = draw(st.integers(1, 6))
    names = iter(draw(st.lists(peers, min_size=18, max_size=18, unique=True)))
    replicas = []
    for index in draw(st.sets(naturals, min_size=1, max_size=3)):
        cuts = sorted(draw(st.sets(st.integers(1, stages - 1), max_size=stages - 1)) if stages > 1 else [])
        bounds = [0, *cuts, stages]
        members = tuple(
            Member(next(names), StageRange(first, stop), draw(endpoints)) for first, stop in pairwise(bounds)
        )
        replicas.append(Replica(index, members, tuple(draw(links) for _ in members[1:]), draw(weights)))
    epochs = st.integers(1, 2**32 - 1)
    return Plan(draw(epochs), draw(epochs), draw(st.integers(0, 2**63 - 1)), tuple(replicas), draw(words))


@st.composite
def descriptor_lists(draw: st.DrawFn, least: int = 0) -> tuple[PayloadDescriptor, ...]:
    """In canonical order, all of one stage and round."""
    stage, round_number = draw(st.integers(0, 511)), draw(naturals)
    return tuple(
        PayloadDescriptor(
            draw(words),
            stage,
            round_number,
            owner,
            draw(words),
            draw(words),
            draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
            draw(st.integers(0, 2**63 - 1)),
            draw(hashes),
            draw(st.binary(max_size=64)),
        )
        for owner in sorted(draw(st.sets(peers, min_size=least, max_size=3)))
    )


@st.composite
def groups(draw: st.DrawFn) -> ExchangeGroup:
    descriptors = draw(descriptor_lists())
    rates = st.integers(0, 2**63 - 1)
    lines = [draw(st.builds(MemberLine, rates, rates, st.booleans())) for _ in descriptors]
    return ExchangeGroup(draw(words), descriptors, 1.5, draw(st.sampled_from([(), tuple(lines)])))


hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
nbytes = st.integers(1, 2**63 - 1)
claims = st.builds(ResultClaim, hashes, nbytes, st.frozensets(peers).map(sorted).map(tuple))


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    descriptors = draw(descriptor_lists())
    holders = st.lists(peers, min_size=1, max_size=3).map(tuple)
    entries = tuple(ManifestEntry(descriptor, draw(holders)) for descriptor in descriptors)
    stage, round_number = (
        (descriptors[0].stage, descriptors[0].round_number) if descriptors else (0, draw(naturals))
    )
    result = draw(st.none() | st.builds(CommittedResult, hashes, nbytes, holders)) if entries else None
    common = stage, round_number, draw(naturals), draw(words)
    if entries:
        return Committed(*common, entries, result)
    return draw(st.sampled_from([Aborted(*common), *([RolledBack(*common, 0)] if round_number else [])]))


@pytest.mark.parametrize(
    ("values", "to_pb", "from_pb"),
    [
        (stage_ranges, STAGE_RANGE.to_pb, STAGE_RANGE.from_pb),
        (capacities, CAPACITY.to_pb, CAPACITY.from_pb),
        (records, PEER_RECORD.to_pb, PEER_RECORD.from_pb),
        (links, LINK.to_pb, LINK.from_pb),
        (plans(), PLAN.to_pb, PLAN.from_pb),
        (
            descriptor_lists(1).map(lambda d: d[0]),
            DESCRIPTOR.to_pb,
            DESCRIPTOR.from_pb,
        ),
        (groups(), GROUP.to_pb, GROUP.from_pb),
        (decisions(), decision_to_pb, decision_from_pb),
        (claims, RESULT_CLAIM.to_pb, RESULT_CLAIM.from_pb),
        (
            descriptor_lists(1).map(lambda found: Rejection(found[0], "not finite")),
            rejection_to_pb,
            lambda message: rejections_from_pb([message])[0],
        ),
        (frame_ids, FRAME_ID.to_pb, FRAME_ID.from_pb),
        (headers, TENSOR_HEADER.to_pb, TENSOR_HEADER.from_pb),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@given(data=st.data())
def test_a_record_survives_the_wire(
    values: st.SearchStrategy[Any],
    to_pb: Callable[[Any], Any],
    from_pb: Callable[[Any], Any],
    data: st.DataObject,
) -> None:
    record = data.draw(values)
    message = to_pb(record)
    assert from_pb(type(message).FromString(message.SerializeToString())) == record


def test_the_bytes_of_a_frame_id_are_those_of_peers_that_still_send_an_attempt_of_0() -> None:
    """Field 5 was the attempt, always 0, which protobuf does not write."""
    id = FrameId(1, 2, 3, 4, FrameKind.NORM)
    assert FRAME_ID.to_pb(id).SerializeToString() == b"\x08\x01\x10\x02\x18\x03\x20\x04\x32\x04norm"


@given(frame_ids, st.lists(headers, max_size=3).map(tuple))
def test_a_frame_header_survives_the_wire(id: FrameId, tensors: tuple[TensorHeader, ...]) -> None:
    total = sum(tensor.nbytes for tensor in tensors)
    if total < 2**64:
        header = frame_header_to_pb(id, tensors)
        assert frame_header_from_pb(header) == (id, tensors, total)


def test_a_group_with_lines_of_other_members_is_refused() -> None:
    descriptor = PayloadDescriptor("run", 0, 1, PeerId("a"), "anchor", "codec", 1.0, 5, "a" * 64, bytes(64))
    line = MemberLine(5, 6, True)
    for lines in ((line, line), (MemberLine(2**63, 0, True),)):
        with pytest.raises(HetnodeError) as refused:
            GROUP.from_pb(GROUP.to_pb(ExchangeGroup("group", (descriptor,), 1.0, lines)))
        assert refused.value.code is ErrorCode.BAD_REQUEST
    assert GROUP.from_pb(GROUP.to_pb(ExchangeGroup("group", (descriptor,), 1.0, (line,)))).lines == (line,)
