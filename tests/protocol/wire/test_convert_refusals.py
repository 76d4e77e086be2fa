"""Messages of peers: each is converted, or refused with a HetnodeError; every field has bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import Capacity, Estimates, LinkEstimate, PayloadDescriptor, PeerId
from protocol.wire.convert.fields import Record, banned_from_pb
from protocol.wire.convert.payloads import (
    DESCRIPTOR,
    GROUP,
    STATE,
    decision_from_pb,
    descriptors_from_pb,
    rejections_from_pb,
)
from protocol.wire.convert.plans import (
    CAPACITY,
    ESTIMATES,
    LINK,
    MEMBER,
    PEER_RECORD,
    PLAN,
    REPLICA,
    STAGE_RANGE,
)
from protocol.wire.framing import FRAME_ID, TENSOR_HEADER, frame_header_from_pb

naturals = st.integers(0, 2**32 - 1)


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
    pb.DecisionReply: decision_from_pb,
    pb.Rejection: lambda message: rejections_from_pb([message]),
    pb.PlanUpdate: lambda message: banned_from_pb(message.banned),
    pb.FrameId: FRAME_ID.from_pb,
    pb.TensorHeader: TENSOR_HEADER.from_pb,
    pb.FrameHeader: frame_header_from_pb,
}


FRAME_PARTS = (pb.FrameId, pb.TensorHeader, pb.FrameHeader)


@cache
def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Any message of `kind`: valid to protobuf, otherwise arbitrary. It is made once: that is slow."""
    fields = {
        field.name: st.lists(_values(field), max_size=5) if field.is_repeated else st.none() | _values(field)
        for field in kind.DESCRIPTOR.fields
    }
    return st.fixed_dictionaries(fields).map(partial(_message, kind))


def _message(kind: Any, values: dict[str, Any]) -> Any:
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        value = values[field.name]
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
        (decision_from_pb, pb.DecisionReply(stage=512)),
        (decision_from_pb, pb.DecisionReply(reason="x" * 1001)),
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
    decision_from_pb(good)
    result = pb.CommittedResult(sha256="0" * 64, nbytes=1, holders=["h"])
    decision_from_pb(pb.DecisionReply(stage=1, round=2, committed=True, entries=entries, result=result))
    for bad in (
        pb.DecisionReply(stage=1, round=2, result=result),
        pb.DecisionReply(stage=1, round=2, committed=True, entries=entries, result=pb.CommittedResult()),
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
            decision_from_pb(bad)


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
