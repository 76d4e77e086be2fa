"""RunStatus and Measurement as messages, and back.

As in protocol.wire.convert, every ``*_from_pb`` raises a HetnodeError for a message that holds no valid
record: BAD_REQUEST, or BAD_SPEC for its run specification.
"""

from __future__ import annotations

from dataclasses import fields

from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from protocol.status import Measurement, PeerStatus, RunStatus
from protocol.types import Reachability
from protocol.wire.convert.fields import AS_SENT, PEER, Field, Record, several
from protocol.wire.convert.plans import ESTIMATES, PLAN

_MAX_MEMBERS = 1_000_000
"""More than one message can hold: the coordinator, which sends a status, is trusted."""

_MEASUREMENT = Record(
    Measurement, pb.Measurement, {field.name: AS_SENT for field in fields(Measurement)} | {"peer": PEER}
)

_PEER_STATUS = Record(
    PeerStatus,
    pb.PeerStatus,
    {
        "seconds_since_seen": AS_SENT,
        "assignment": AS_SENT,
        "estimates": ESTIMATES,
        "reachability": Field(lambda name: Reachability(name or Reachability.OPEN)),
        "problem": AS_SENT,
        "role_reason": AS_SENT,
        "rests": AS_SENT,
    },
    names={"seconds_since_seen": "seen_seconds_ago", "assignment": "place"},
)

_RUN_STATUS = Record(
    RunStatus,
    pb.StatusReply,
    {
        "spec": Field(RunSpec.from_json, lambda spec: spec.canonical_json),
        "message": AS_SENT,
        "peers": several(_PEER_STATUS, _MAX_MEMBERS),
        "measurements": several(_MEASUREMENT, _MAX_MEMBERS),
        "plan": Field(PLAN.read, PLAN.write, optional=True),
        "time": AS_SENT,
    },
    names={
        "spec": "spec_json",
        "message": "sentence",
        "stage_rounds_committed": "rounds_committed",
        "stage_rounds_aborted": "rounds_aborted",
        "measurements": "latest",
    },
)

measurement_to_pb, measurement_from_pb = _MEASUREMENT.to_pb, _MEASUREMENT.from_pb
status_to_pb, status_from_pb = _RUN_STATUS.to_pb, _RUN_STATUS.from_pb
