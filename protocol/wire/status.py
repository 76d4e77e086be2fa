"""RunStatus and Measurement as messages, and back.

As in protocol.wire.convert, every ``*_from_pb`` raises a HetnodeError for a message that holds no valid
record: BAD_REQUEST, or BAD_SPEC for its run specification.
"""

from __future__ import annotations

from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from protocol.status import Measurement, PeerStatus, RunPhase, RunStatus, fields_of
from protocol.types import Lifecycle
from protocol.wire.convert.fields import peer_from_pb, raises_bad_request, role_from_pb
from protocol.wire.convert.measurements import estimates_from_pb, estimates_to_pb
from protocol.wire.convert.plans import plan_from_pb, plan_to_pb


def measurement_to_pb(measurement: Measurement) -> pb.Measurement:
    return pb.Measurement(**fields_of(measurement))


def measurement_from_pb(message: pb.Measurement) -> Measurement:
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    values["peer"] = peer_from_pb(message.peer)
    values["round_number"] = values.pop("round")
    return Measurement(**values)


def status_to_pb(status: RunStatus) -> pb.StatusReply:
    return pb.StatusReply(
        run=status.spec.run_id,
        spec_json=status.spec.canonical_json,
        phase=status.phase.value,
        sentence=status.message,
        rounds_decided=status.rounds_decided,
        rounds_committed=status.stage_rounds_committed,
        rounds_aborted=status.stage_rounds_aborted,
        peers=map(_peer_status_to_pb, status.peers),
        latest=map(measurement_to_pb, status.measurements),
        plan=plan_to_pb(status.plan) if status.plan is not None else None,
        anchors_agree=status.anchors_agree,
        time=status.time,
    )


@raises_bad_request
def status_from_pb(message: pb.StatusReply) -> RunStatus:
    return RunStatus(
        spec=RunSpec.from_json(message.spec_json),
        phase=RunPhase(message.phase),
        message=message.sentence,
        rounds_decided=message.rounds_decided,
        stage_rounds_committed=message.rounds_committed,
        stage_rounds_aborted=message.rounds_aborted,
        peers=tuple(map(_peer_status_from_pb, message.peers)),
        measurements=tuple(map(measurement_from_pb, message.latest)),
        plan=plan_from_pb(message.plan) if message.HasField("plan") else None,
        anchors_agree=message.anchors_agree,
        time=message.time,
    )


def _peer_status_to_pb(status: PeerStatus) -> pb.PeerStatus:
    return pb.PeerStatus(
        peer=status.peer,
        role=status.role.value,
        lifecycle=status.lifecycle.value,
        round=status.round_number,
        inner_step=status.inner_step,
        seen_seconds_ago=status.seconds_since_seen,
        place=status.assignment,
        estimates=estimates_to_pb(status.estimates),
    )


def _peer_status_from_pb(message: pb.PeerStatus) -> PeerStatus:
    return PeerStatus(
        peer=peer_from_pb(message.peer),
        role=role_from_pb(message.role),
        lifecycle=Lifecycle(message.lifecycle),
        round_number=message.round,
        inner_step=message.inner_step,
        seconds_since_seen=message.seen_seconds_ago,
        assignment=message.place,
        estimates=estimates_from_pb(message.estimates),
    )
