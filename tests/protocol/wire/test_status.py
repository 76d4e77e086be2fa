"""The status of a run as a message: its bytes, the way back, and what is refused."""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import replace

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.group.measured import MOST_MEASURED
from protocol.pb import hetnode_pb2 as pb
from protocol.status import (
    Cause,
    CauseCode,
    HealthFinding,
    Measurement,
    PayloadAgreement,
    Sign,
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
from protocol.wire.convert.fields import MAX_STAGES
from protocol.wire.status import (
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
    status_of(
        estimates=Estimates(Capacity("cpu", 2**30, 2), 0.5, (LinkEstimate(keyed(1).peer, 0.1, 1e6),)),
        measurements=[MEASUREMENT],
    ),
    measurements=(
        replace(
            MEASUREMENT,
            progress_norm=1.5,
            error_norm=0.5,
            agreements=(
                PayloadAgreement(0, PEER, cosine=0.25, norm=2.0, mean_norm=1.0),
                PayloadAgreement(1, PEER, None, 0.0, 0.5, alike=-0.25, unlike=0.125, likeness=0.5),
            ),
        ),
    ),
    plan=PLAN,
    pause=Pause(3, PausedBy.ALARM, "the loss has risen"),
)
STATUS = replace(
    STATUS,
    peers=tuple(
        replace(
            peer, rests=True, name="José", cause=Cause(CauseCode.SPARE), waits=(Wait.GROUP, Wait.PAYLOADS)
        )
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
        (HealthFinding(Sign.LOSS, "Round 1: a sentence.", peers=(PEER,)),),
    ),
    alarm=Cause(CauseCode.ALARM, round_number=1, detail="Round 1: another sentence."),
)


def test_the_bytes_stay_as_they_are() -> None:
    """Nodes and coordinators of protocol version 2 write these bytes."""
    measurement = measurement_to_pb(replace(MEASUREMENT, peer=PeerId("P")))
    assert measurement.SerializeToString(deterministic=True).hex() == (
        "0a0150100718022001290000000000000c40310000000000000a4038800541000000000000294049000000000000e03f"
        "500b580c600d680e71000000000000e83f780180010a88010390010899010000000000002340"
    )


def test_a_measurement_comes_back_as_it_was() -> None:
    assert measurement_from_pb(measurement_to_pb(MEASUREMENT)) == MEASUREMENT


@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_status_comes_back_as_it_was(plan: Plan | None) -> None:
    status = replace(STATUS, plan=plan)
    reply = pb.StatusReply.FromString(status_to_pb(status).SerializeToString())
    assert status_from_pb(reply) == status


def test_a_program_without_hetnode_reads_the_figures_of_a_status_as_plain_fields() -> None:
    reply = status_to_pb(STATUS)
    assert (reply.run, reply.phase, reply.anchors_agree) == (STATUS.run, STATUS.phase, STATUS.anchors_agree)
    assert hashlib.sha256(reply.spec_json.encode()).hexdigest() == STATUS.spec.hash
    assert (reply.rounds_decided, reply.rounds_committed, reply.rounds_aborted) == (
        STATUS.rounds_decided,
        STATUS.stage_rounds_committed,
        STATUS.stage_rounds_aborted,
    )
    assert [(each.peer, each.role, each.lifecycle, each.round, each.inner_step) for each in reply.peers] == [
        (each.peer, each.role, each.lifecycle, each.round_number, each.inner_step) for each in STATUS.peers
    ]


def test_waits_that_a_later_version_knows_are_left_out() -> None:
    assert waits_from_pb(["tea", "plan"]) == (Wait.PLAN,)


@pytest.mark.parametrize("waits", [["plan"] * 33, ["x" * 200], ["\x1b[31m"]])
def test_waits_are_bounded(waits: list[str]) -> None:
    with pytest.raises(HetnodeError) as error:
        waits_from_pb(waits)
    assert error.value.code is ErrorCode.BAD_REQUEST


def test_figures_that_are_not_finite_come_back() -> None:
    status = status_of(measurements=[replace(MEASUREMENT, validation_loss=math.inf)])
    assert status_from_pb(status_to_pb(status)) == status


@pytest.mark.parametrize("record", [b"", b"{}", zlib.compress(b"{}"), zlib.compress(b'{"phase":"asleep"}')])
def test_a_message_without_a_valid_status_is_refused(record: bytes) -> None:
    with pytest.raises(HetnodeError) as error:
        status_from_pb(pb.StatusReply(record=record))
    assert error.value.code is ErrorCode.BAD_REQUEST


def test_a_measurement_of_too_many_payloads_is_refused_before_it_is_read() -> None:
    message = measurement_to_pb(MEASUREMENT)
    most = MAX_STAGES * MOST_MEASURED
    message.agreements.extend([pb.PayloadAgreement(owner="\n")] * (most + 1))
    with pytest.raises(HetnodeError, match=rf"{most + 1} elements") as refused:
        measurement_from_pb(message)
    assert refused.value.code is ErrorCode.BAD_REQUEST
