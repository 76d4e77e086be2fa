"""Records on the wire: what is sent comes back equal, and no bytes raise anything but a HetnodeError."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import (
    Capacity,
    Decision,
    Dialer,
    DType,
    Estimates,
    ExchangeGroup,
    FrameId,
    FrameKind,
    Link,
    LinkEstimate,
    ManifestEntry,
    Member,
    PayloadDescriptor,
    PeerId,
    PeerRecord,
    Plan,
    Rejection,
    Replica,
    Role,
    StageRange,
    TensorHeader,
)
from protocol.wire.convert.fields import banned_from_pb
from protocol.wire.convert.frames import FRAME_ID, TENSOR_HEADER, frame_header_from_pb, frame_header_to_pb
from protocol.wire.convert.measurements import CAPACITY, ESTIMATES
from protocol.wire.convert.payloads import (
    DECISION,
    DESCRIPTOR,
    GROUP,
    STATE,
    descriptors_from_pb,
    rejection_to_pb,
    rejections_from_pb,
)
from protocol.wire.convert.plans import LINK, MEMBER, PEER_RECORD, PLAN, REPLICA, STAGE_RANGE
from protocol.wire.convert.record import Record
from protocol.wire.rpc_errors import abort_with, error_from_rpc

words = st.text(st.characters(codec="utf-8").filter(str.isprintable), min_size=1, max_size=20)
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
def decisions(draw: st.DrawFn) -> Decision:
    descriptors = draw(descriptor_lists())
    holders = st.lists(peers, min_size=1, max_size=3).map(tuple)
    entries = tuple(ManifestEntry(descriptor, draw(holders)) for descriptor in descriptors)
    stage, round_number = (
        (descriptors[0].stage, descriptors[0].round_number) if descriptors else (0, draw(naturals))
    )
    return Decision(stage, round_number, bool(entries), entries, draw(naturals), draw(words))


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
        (st.builds(ExchangeGroup, words, descriptor_lists()), GROUP.to_pb, GROUP.from_pb),
        (decisions(), DECISION.to_pb, DECISION.from_pb),
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


CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    pb.StageRange: STAGE_RANGE.from_pb,
    pb.Capacity: CAPACITY.from_pb,
    pb.PeerRecord: PEER_RECORD.from_pb,
    pb.Member: MEMBER.from_pb,
    pb.Link: LINK.from_pb,
    pb.Replica: REPLICA.from_pb,
    pb.Plan: PLAN.from_pb,
    pb.PayloadDescriptor: DESCRIPTOR.from_pb,
    pb.MatchReply: GROUP.from_pb,
    pb.DecisionReply: DECISION.from_pb,
    pb.Rejection: lambda message: rejections_from_pb([message]),
    pb.PlanUpdate: lambda message: banned_from_pb(message.banned),
    pb.FrameId: FRAME_ID.from_pb,
    pb.TensorHeader: TENSOR_HEADER.from_pb,
    pb.FrameHeader: frame_header_from_pb,
}
FRAME_PARTS = (pb.FrameId, pb.TensorHeader, pb.FrameHeader)


@st.composite
def messages(draw: st.DrawFn, kind: Any) -> Any:
    """Any message of `kind`: valid to protobuf, otherwise arbitrary."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        value = draw(
            st.lists(_values(field), max_size=5) if field.is_repeated else st.none() | _values(field)
        )
        if value is None:
            continue
        if field.is_repeated:
            getattr(message, field.name).extend(value)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(getattr(pb, field.message_type.name))
    return {
        field.TYPE_UINT32: st.integers(0, 3) | naturals,
        field.TYPE_UINT64: st.integers(0, 3) | st.integers(0, 2**64 - 1),
        field.TYPE_DOUBLE: st.floats(),
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_BYTES: st.binary(max_size=80),
        field.TYPE_STRING: st.sampled_from(
            ["", "a", "f32", "forward", "upstream", "stage", "0" * 64, "h:1", "\n", "x" * 2000]
        )
        | st.text(),
    }[field.type]


@pytest.mark.parametrize("kind", CONVERTERS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_no_message_raises_anything_but_a_hetnode_error(kind: Any, data: st.DataObject) -> None:
    expect_converted_or_refused(kind, data.draw(messages(kind)))


@pytest.mark.parametrize("kind", CONVERTERS, ids=lambda kind: kind.__name__)
@given(raw=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_hetnode_error(kind: Any, raw: bytes) -> None:
    try:
        message = kind.FromString(raw)
    except DecodeError:
        return
    expect_converted_or_refused(kind, message)


def expect_converted_or_refused(kind: Any, message: Any) -> None:
    refusal = None
    try:
        CONVERTERS[kind](message)
    except HetnodeError as error:
        refusal = error
    if refusal is not None:
        code = ErrorCode.FRAME_CORRUPT if kind in FRAME_PARTS else ErrorCode.BAD_REQUEST
        assert refusal.code is code
        assert len(refusal.cause) < 300
        assert refusal.remedy


PAYLOAD = PayloadDescriptor("run", 1, 2, PeerId("a"), "anchor", "codec", 1.0, 3, "0" * 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": math.nan},
        {"weight": math.inf},
        {"weight": 0.0},
        {"weight": -1.0},
        {"nbytes": 2**63},
        {"stage": 512},
        {"sha256": "0" * 63},
        {"sha256": "G" * 64},
        {"owner": "a" * 65},
        {"owner": ""},
        {"owner": "a\nb"},
        {"codec": "x" * 129},
        {"signature": b"x" * 65},
    ],
)
def test_a_bad_field_of_a_payload_is_refused(changes: dict[str, Any]) -> None:
    message = DESCRIPTOR.to_pb(PAYLOAD)
    DESCRIPTOR.from_pb(message)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(HetnodeError):
        DESCRIPTOR.from_pb(message)


@pytest.mark.parametrize(
    ("from_pb", "message"),
    [
        (CAPACITY.from_pb, pb.Capacity(memory_bytes=2**63)),
        (CAPACITY.from_pb, pb.Capacity(device="x" * 129)),
        (STAGE_RANGE.from_pb, pb.StageRange(first=0, stop=513)),
        (LINK.from_pb, pb.Link(k=2**15 + 1, dialer="upstream")),
        (LINK.from_pb, pb.Link(k=1, dialer="sideways")),
        (MEMBER.from_pb, pb.Member(peer="p", stages=pb.StageRange(stop=1), endpoint="host")),
        (MEMBER.from_pb, pb.Member(peer="p", stages=pb.StageRange(stop=1), endpoint="host:65536")),
        (PEER_RECORD.from_pb, pb.PeerRecord(peer="p", role="observer")),
        (GROUP.from_pb, pb.MatchReply(group_id="g", seconds=2e7)),
        (GROUP.from_pb, pb.MatchReply(group_id="g", seconds=math.nan)),
        (STATE.from_pb, pb.StateRecord(run="r", part="stage", digest="0" * 63)),
        (STATE.from_pb, pb.StateRecord(run="r", part="stage", digest="0" * 64, stage=512)),
        (STATE.from_pb, pb.StateRecord(run="r", part="stage", digest="0" * 64, holders=[""])),
        (DECISION.from_pb, pb.DecisionReply(stage=512)),
        (DECISION.from_pb, pb.DecisionReply(reason="x" * 1001)),
        (rejections_from_pb, [pb.Rejection(descriptor=DESCRIPTOR.to_pb(PAYLOAD))]),
        (rejections_from_pb, [pb.Rejection(descriptor=DESCRIPTOR.to_pb(PAYLOAD), reason="late")] * 2),
        (descriptors_from_pb, [DESCRIPTOR.to_pb(PAYLOAD)] * 2),
        (banned_from_pb, ["p"] * 10_001),
    ],
)
def test_a_value_out_of_bounds_is_refused(from_pb: Callable[[Any], Any], message: Any) -> None:
    with pytest.raises(HetnodeError) as error:
        from_pb(message)
    assert error.value.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0.0},
        {"weight": 2e6},
        {"weight": math.nan},
        {"microbatches": 2**20 + 1},
        {"members": []},
        {"links": []},
    ],
)
def test_a_replica_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    message = plan_of(("a", 0, 1), ("b", 1, 3)).replicas[0]
    REPLICA.from_pb(message)
    for name, value in changes.items():
        message.ClearField(name)
        if value:
            setattr(message, name, value)
    with pytest.raises(HetnodeError):
        REPLICA.from_pb(message)


def test_a_field_without_bounds_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="float"):
        Record(LinkEstimate, pb.LinkEstimate, {})


@pytest.mark.parametrize(
    "header",
    [
        pb.TensorHeader(name="x", dtype="f33", shape=[1]),
        pb.TensorHeader(name="x", dtype="f32", shape=[1] * 5),
        pb.TensorHeader(name="x", dtype="f32", shape=[0]),
        pb.TensorHeader(name="x", dtype="f32", shape=[2**31]),
        pb.TensorHeader(dtype="f32", shape=[1]),
    ],
)
def test_a_bad_tensor_header_is_a_corrupt_frame(header: pb.TensorHeader) -> None:
    with pytest.raises(HetnodeError) as error:
        TENSOR_HEADER.from_pb(header)
    assert error.value.code is ErrorCode.FRAME_CORRUPT


def plan_of(*members: tuple[str, int, int]) -> pb.Plan:
    """A plan of one replica with these (peer, first, stop)."""
    replica = pb.Replica(
        members=[pb.Member(peer=p, stages=pb.StageRange(first=a, stop=b)) for p, a, b in members],
        links=[pb.Link(k=1, dialer="upstream")] * (len(members) - 1),
        weight=1.0,
    )
    return pb.Plan(epoch=1, from_round=1, replicas=[replica])


def test_a_plan_with_gaps_repetitions_or_nothing_in_it_is_refused() -> None:
    good = plan_of(("a", 0, 1), ("b", 1, 3))
    PLAN.from_pb(good)
    other_shape = pb.Plan()
    other_shape.CopyFrom(good)
    other_shape.replicas.append(
        pb.Replica(index=1, weight=1.0, members=plan_of(("c", 0, 2)).replicas[0].members)
    )
    for bad in (
        plan_of(("a", 1, 2)),
        plan_of(("a", 0, 1), ("b", 2, 3)),
        plan_of(("a", 0, 1), ("a", 1, 2)),
        plan_of(("a", 0, 0)),
        pb.Plan(epoch=1, from_round=1),
        pb.Plan(epoch=0, from_round=1, replicas=good.replicas),
        pb.Plan(epoch=1, from_round=1, replicas=[*good.replicas, *good.replicas]),
        other_shape,
    ):
        with pytest.raises(HetnodeError):
            PLAN.from_pb(bad)


def test_a_manifest_out_of_canonical_order_is_refused() -> None:
    entries = [
        pb.ManifestEntry(
            descriptor=pb.PayloadDescriptor(
                run="r", stage=1, round=2, owner=o, anchor_digest="a", codec="c", weight=1, sha256="0" * 64
            ),
            holders=["h"],
        )
        for o in ("a", "b")
    ]
    good = pb.DecisionReply(stage=1, round=2, committed=True, entries=entries)
    DECISION.from_pb(good)
    for bad in (
        pb.DecisionReply(stage=1, round=2, committed=True, entries=entries[::-1]),
        pb.DecisionReply(stage=1, round=2, committed=True, entries=[entries[0]] * 2),
        pb.DecisionReply(stage=0, round=2, committed=True, entries=entries),
        pb.DecisionReply(stage=1, round=2, committed=False, entries=entries),
        pb.DecisionReply(stage=1, round=2, committed=True),
        pb.DecisionReply(
            stage=1, round=2, committed=True, entries=[pb.ManifestEntry(descriptor=entries[0].descriptor)]
        ),
    ):
        with pytest.raises(HetnodeError):
            DECISION.from_pb(bad)


SENTENCES = ["", "plain.", "100 % of größe\nnext line 😀", "x" * 5000]


@pytest.mark.parametrize("code", [ErrorCode.SPEC_MISMATCH, ErrorCode.BAD_REQUEST])
@pytest.mark.parametrize("sentence", SENTENCES)
async def test_an_error_survives_a_real_call(code: ErrorCode, sentence: str) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        await abort_with(context, HetnodeError(code, sentence, sentence))

    handler = grpc.unary_unary_rpc_method_handler(refuse)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Refusing", {"Call": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Refusing/Call")(b"")
    await server.stop(None)
    error = error_from_rpc(caught.value)
    assert error is not None
    assert error.code is code
    expected = sentence.replace("\n", " ")[:2000]
    assert (error.cause, error.remedy) == (expected, expected)
    invalid = code is ErrorCode.BAD_REQUEST
    assert (caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT) == invalid


async def test_a_failure_of_grpc_itself_is_no_hetnode_error() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Refusing/Call")(b"")
    assert error_from_rpc(caught.value) is None


@pytest.mark.parametrize("value", [1e-320, 0.5, -1.0, math.inf, math.nan, 1e300])
def test_an_impossible_speed_is_refused(value: float) -> None:
    with pytest.raises(HetnodeError):
        CAPACITY.from_pb(pb.Capacity(device="cpu", flops=value))
    with pytest.raises(HetnodeError):
        ESTIMATES.from_pb(pb.Estimates(capacity=pb.Capacity(uplink=value)))


@pytest.mark.parametrize("value", [1e-320, 1e7, -1.0, math.nan])
def test_an_impossible_duration_is_refused(value: float) -> None:
    with pytest.raises(HetnodeError):
        ESTIMATES.from_pb(pb.Estimates(microbatch_seconds=value))
    with pytest.raises(HetnodeError):
        CAPACITY.from_pb(pb.Capacity(round_trip=value))


def test_a_measurement_out_of_bounds_is_sent_as_not_measured() -> None:
    link = LinkEstimate(PeerId("peer1"), 1e-12, 0.3, math.inf)
    odd = Estimates(Capacity("cpu", 1, 1, 1e-9, math.nan, 1e30, 1e9), 1e-12, (link,))
    received = ESTIMATES.from_pb(ESTIMATES.to_pb(odd))
    assert received == Estimates(Capacity("cpu", 1, 1), 0.0, (LinkEstimate(link.peer, 0.0, 0.0, 0.0),))
