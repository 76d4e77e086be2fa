"""RunStatus and Measurement as messages, and back.

As in protocol.wire.convert, every ``*_from_pb`` raises a HetnodeError for a message that holds no valid
record: BAD_REQUEST, or BAD_SPEC for its run specification.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from protocol.status import (
    Measurement,
    PayloadAgreement,
    PeerStatus,
    RunStatus,
    StageHealth,
    TrainingHealth,
    Wait,
)
from protocol.types import Reachability
from protocol.wire.convert.fields import (
    AS_SENT,
    MAX_STAGES,
    NAME,
    PEER,
    SENTENCE,
    SHOWN_NAME,
    Field,
    Record,
    between,
    several,
)
from protocol.wire.convert.plans import ESTIMATES, PAUSE, PLAN

_MAX_KEPT = 64
"""Rounds whose anchors one peer says that it keeps."""
_MAX_MEMBERS = 1_000_000
"""More than one message can hold: the coordinator, which sends a status, is trusted."""

_MAX_WAITS = 32
"""More than there are, for those of later versions."""


def _known_waits(names: Iterable[str]) -> tuple[Wait, ...]:
    return tuple(Wait(name) for name in names if name in set(Wait))


_WAITS = several(NAME, _MAX_WAITS)
WAITS: Field[tuple[Wait, ...]] = Field(lambda names: _known_waits(_WAITS.read(names)), list)
"""What a node waits for. Names that this version does not know are left out."""

_COSINE: Field[float | None] = Field(lambda value: value, optional=True)
_AGREEMENT = Record(
    PayloadAgreement,
    pb.PayloadAgreement,
    # The coordinator drops single figures that are out of bounds: coordinator.health.intake.
    {"cosine": _COSINE, "norm": AS_SENT, "mean_norm": AS_SENT, "alike": _COSINE, "unlike": _COSINE},
)

_MEASUREMENT = Record(
    Measurement,
    pb.Measurement,
    {field.name: AS_SENT for field in fields(Measurement)}
    | {"peer": PEER, "agreements": several(_AGREEMENT, MAX_STAGES)},
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
        "message": AS_SENT,
        "waits": WAITS,
        "name": SHOWN_NAME,
    },
    names={"seconds_since_seen": "seen_seconds_ago", "assignment": "place"},
)

_STAGE_HEALTH = Record(
    StageHealth,
    pb.StageHealth,
    dict.fromkeys(("norm", "mean_norm"), AS_SENT)
    | dict.fromkeys(("cosine", "least_cosine", "full_cosine", "pipeline_cosine", "alike", "unlike"), _COSINE),
)
_MAX_FINDINGS = 100
_HEALTH = Record(
    TrainingHealth,
    pb.TrainingHealth,
    {
        "stages": several(_STAGE_HEALTH, MAX_STAGES),
        "error_share": _COSINE,
        "findings": several(SENTENCE, _MAX_FINDINGS),
    },
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
        "round_seconds": AS_SENT,
        "expected_round_seconds": Field(float, optional=True),
        "remaining_seconds": Field(float, optional=True),
        "pause": Field(PAUSE.read, PAUSE.write, optional=True),
        "health": Field(_HEALTH.read, _HEALTH.write, optional=True),
        "alarm": AS_SENT,
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
waits_from_pb = WAITS.from_pb
kept_from_pb = several(between(0, 2**32 - 1), _MAX_KEPT).from_pb
status_to_pb, status_from_pb = _RUN_STATUS.to_pb, _RUN_STATUS.from_pb
