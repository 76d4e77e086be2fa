"""Status and measurements as messages, and back.

As in protocol.wire.convert, every ``*_from_pb`` raises a HetnodeError for a message that holds no valid
record: BAD_REQUEST.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import fields

from protocol.errors import faulty_peer
from protocol.group.measured import MOST_MEASURED
from protocol.pb import hetnode_pb2 as pb
from protocol.status import Measurement, PayloadAgreement, RunStatus, Wait
from protocol.wire.convert.fields import AS_SENT, MAX_STAGES, NAME, PEER, Field, Record, between, several
from protocol.wire.record_codec import UNBOUNDED, RecordCodec

_MAX_KEPT = 64
"""Rounds whose anchors one peer says that it keeps."""
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
    # The coordinator drops single figures that are out of bounds: coordinator.api.measuring.
    {"norm": AS_SENT, "mean_norm": AS_SENT}
    | dict.fromkeys(("cosine", "alike", "unlike", "likeness"), _COSINE),
)

_MEASUREMENT = Record(
    Measurement,
    pb.Measurement,
    {field.name: AS_SENT for field in fields(Measurement)}
    | {"peer": PEER, "agreements": several(_AGREEMENT, MAX_STAGES * MOST_MEASURED)},
)

_STATUS = RecordCodec[RunStatus](RunStatus, UNBOUNDED, ignores_unknown=True)

measurement_to_pb, measurement_from_pb = _MEASUREMENT.to_pb, _MEASUREMENT.from_pb
waits_from_pb = WAITS.from_pb
kept_from_pb = several(between(0, 2**32 - 1), _MAX_KEPT).from_pb


def status_to_pb(status: RunStatus) -> pb.StatusReply:
    """The record as JSON, an eighth of its size by zlib, and the fields for programs without hetnode."""
    peers = [
        pb.PeerStatus(
            peer=each.peer,
            role=each.role,
            lifecycle=each.lifecycle,
            round=each.round_number,
            inner_step=each.inner_step,
            seen_seconds_ago=each.seconds_since_seen,
            place=each.assignment,
        )
        for each in status.peers
    ]
    return pb.StatusReply(
        run=status.run,
        spec_json=status.spec.canonical_json,
        phase=status.phase,
        rounds_decided=status.rounds_decided,
        rounds_committed=status.stage_rounds_committed,
        rounds_aborted=status.stage_rounds_aborted,
        peers=peers,
        anchors_agree=status.anchors_agree,
        time=status.time,
        round=status.round_number,
        tokens_committed=status.tokens_committed,
        record=zlib.compress(_STATUS.encode(status), level=1),
    )


def status_from_pb(reply: pb.StatusReply) -> RunStatus:
    """The inverse of :func:`status_to_pb`. The coordinator is trusted not to send too much."""
    try:
        data = zlib.decompress(reply.record)
    except zlib.error as error:
        raise faulty_peer(f"The coordinator's status cannot be read: {error}.") from None
    return _STATUS.decode(data)
