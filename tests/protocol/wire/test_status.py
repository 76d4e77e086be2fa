"""The status of a run as a message: its bytes, the way back, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.status import (
    Explanation,
    Measurement,
    PayloadAgreement,
    Sentence,
    StageHealth,
    TrainingHealth,
    Wait,
)
from protocol.types import (
    Capacity,
    Estimates,
    LinkEstimate,
    Member,
    Pause,
    PausedBy,
    PeerId,
    Plan,
    Replica,
    StageRange,
)
from protocol.wire.status import (
    explanation_from_pb,
    explanation_to_pb,
    measurement_from_pb,
    measurement_to_pb,
    status_from_pb,
    status_to_pb,
    waits_from_pb,
)
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
    measurements=(
        replace(
            MEASUREMENT,
            progress_norm=1.5,
            error_norm=0.5,
            agreements=(
                PayloadAgreement(0, PEER, cosine=0.25, norm=2.0, mean_norm=1.0),
                PayloadAgreement(1, PEER, None, 0.0, 0.5, alike=-0.25, unlike=0.125),
            ),
        ),
    ),
    plan=PLAN,
    pause=Pause(3, PausedBy.ALARM, "the loss has risen"),
)
STATUS = replace(
    STATUS,
    peers=tuple(
        replace(peer, rests=True, name="José", message="waits as a spare", waits=(Wait.GROUP, Wait.PAYLOADS))
        for peer in STATUS.peers
    ),
    round_number=2,
    round_seconds=1.5,
    expected_round_seconds=4.0,
    remaining_seconds=6.5,
    tokens_committed=4096,
    health=TrainingHealth(
        1,
        (
            StageHealth(0, 3, 0.125, -0.25, 0.25, 0.5, 0.75, -0.5, 2.0, 1.0),
            StageHealth(1, 1, None, None, None, None, None, None, 0.0, 0.0),
        ),
        0.5,
        ("Round 1: a sentence.",),
    ),
    alarm="Round 1: another sentence.",
)


def test_the_bytes_stay_as_they_are() -> None:
    """Nodes and coordinators of protocol version 2 write these bytes."""
    measurement = measurement_to_pb(replace(MEASUREMENT, peer=PeerId("P")))
    assert measurement.SerializeToString(deterministic=True).hex() == (
        "0a0150100718022001290000000000000c40310000000000000a4038800541000000000000294049000000000000e03f"
        "500b580c600d680e71000000000000e83f780180010a88010390010899010000000000002340"
    )
    peer = status_to_pb(STATUS).peers[0]
    peer.peer = "P"
    for later in ("estimates", "reachability", "problem", "role_reason", "rests", "message", "waits", "name"):
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


def test_what_is_not_known_yet_comes_back_as_unknown() -> None:
    status = replace(STATUS, expected_round_seconds=None, remaining_seconds=None)
    assert status_from_pb(status_to_pb(status)) == status
    # Seconds that are known to be 0 are another thing.
    status = replace(STATUS, remaining_seconds=0.0)
    assert status_from_pb(status_to_pb(status)).remaining_seconds == 0.0


def test_waits_that_a_later_version_knows_are_left_out() -> None:
    message = status_to_pb(STATUS)
    message.peers[0].waits.append("tea")
    assert status_from_pb(message).peers[0].waits == (Wait.GROUP, Wait.PAYLOADS)
    assert waits_from_pb(["tea", "plan"]) == (Wait.PLAN,)


@pytest.mark.parametrize("waits", [["plan"] * 33, ["x" * 200], ["\x1b[31m"]])
def test_waits_are_bounded(waits: list[str]) -> None:
    with pytest.raises(HetnodeError) as error:
        waits_from_pb(waits)
    assert error.value.code is ErrorCode.BAD_REQUEST


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


def test_a_measurement_of_too_many_payloads_is_refused_before_it_is_read() -> None:
    message = measurement_to_pb(MEASUREMENT)
    message.agreements.extend([pb.PayloadAgreement(owner="\n")] * 600)
    with pytest.raises(HetnodeError, match="600 elements") as refused:
        measurement_from_pb(message)
    assert refused.value.code is ErrorCode.BAD_REQUEST


def test_an_explanation_survives_the_wire() -> None:
    explanation = Explanation("Round 1", (Sentence("It was slow.", (3, 2**40)), Sentence("No event.")))
    assert explanation_from_pb(explanation_to_pb(explanation)) == explanation
