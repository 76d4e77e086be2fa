"""The status of a run as a message: its bytes, the way back, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.status import Measurement
from protocol.types import Capacity, Estimates, LinkEstimate, Member, PeerId, Plan, Replica, StageRange
from protocol.wire.status import measurement_from_pb, measurement_to_pb, status_from_pb, status_to_pb
from tests.builders import keyed, status_of

PEER = keyed(0).peer
MEASUREMENT = Measurement(
    peer=PEER,
    round_number=7,
    replica=2,
    position=1,
    train_loss=3.5,
    validation_loss=3.25,
    tokens=640,
    inner_seconds=12.5,
    outer_seconds=0.5,
    link_bytes_sent=11,
    link_bytes_dense=12,
    payload_bytes=13,
    payload_bytes_dense=14,
    gradient_norm=0.75,
    complete=True,
    steps=10,
    extra_steps=3,
    microbatches=8,
    compute_seconds=9.5,
)
PLAN = Plan(1, 1, 0, (Replica(0, (Member(PEER, StageRange(0, 2), ""),), ()),), "the first plan")
STATUS = replace(
    status_of(estimates=Estimates(Capacity("cpu", 2**30, 2), 0.5, (LinkEstimate(keyed(1).peer, 0.1, 1e6),))),
    measurements=(MEASUREMENT,),
    plan=PLAN,
)
STATUS = replace(STATUS, peers=tuple(replace(peer, rests=True) for peer in STATUS.peers))


def test_the_bytes_stay_as_they_are() -> None:
    """Nodes and coordinators of protocol version 2 write these bytes."""
    measurement = measurement_to_pb(replace(MEASUREMENT, peer=PeerId("P")))
    assert measurement.SerializeToString(deterministic=True).hex() == (
        "0a0150100718022001290000000000000c40310000000000000a4038800541000000000000294049000000000000e03f"
        "500b580c600d680e71000000000000e83f780180010a88010390010899010000000000002340"
    )
    peer = status_to_pb(STATUS).peers[0]
    peer.peer = "P"
    for later in ("estimates", "reachability", "problem", "role_reason", "rests"):
        peer.ClearField(later)
    assert peer.SerializeToString(deterministic=True).hex() == (
        "0a015012077265706c6963611a08747261696e696e672002280131000000000000f83f"
        "3a157265706c6963612d302c2073746167657320302d31"
    )


def test_a_measurement_comes_back_as_it_was() -> None:
    assert measurement_from_pb(measurement_to_pb(MEASUREMENT)) == MEASUREMENT


def test_every_field_of_the_message_is_set() -> None:
    message = status_to_pb(STATUS)
    for part in (message, message.peers[0], message.latest[0]):
        assert {field.name for field, _ in part.ListFields()} == set(part.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_status_comes_back_as_it_was(plan: Plan | None) -> None:
    status = replace(STATUS, plan=plan)
    data = status_to_pb(status).SerializeToString()
    assert status_from_pb(pb.StatusReply.FromString(data)) == status


@pytest.mark.parametrize(
    "changes",
    [{"phase": "asleep"}, {"spec_json": "{"}, {"peers": [pb.PeerStatus(peer="x", lifecycle="undead")]}],
)
def test_a_message_without_a_valid_status_is_refused(changes: dict[str, object]) -> None:
    message = status_to_pb(STATUS)
    for name in changes:
        message.ClearField(name)
    message.MergeFrom(pb.StatusReply(**changes))
    with pytest.raises(HetnodeError) as error:
        status_from_pb(message)
    assert error.value.code in (ErrorCode.BAD_REQUEST, ErrorCode.BAD_SPEC)
