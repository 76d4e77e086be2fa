"""The rows of a history: what changes in its tables with one event or measurement.

Each class is one kind of change, and its fields are the values in the order in which the store binds them.
Times and durations are whole milliseconds (:func:`milliseconds`). `peer` is the number of a peer in this
history (:class:`coordinator.history.row_builder.RowBuilder`), `sequence` that of the event.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from protocol.types import PeerId, Role

OFFERED, COUNTED, LEFT_OUT, WITHHELD, MISSING = range(5)
"""The stored form of :class:`coordinator.history.records.Standing`, in its order."""
OPEN, COMMITTED, ABORTED, SKIPPED = range(4)
"""The stored form of :class:`coordinator.history.records.Outcome`, in its order."""

MOST_TEXT = 400
"""Letters of a text that are kept."""
_MOST_COUNT = 2**48
"""SQLite has no greater integers than 2^63, and sums of what peers claim must stay below."""


def milliseconds(seconds: float) -> int:
    """As the store keeps times. Those of the metrics file have three decimals, and are the same here."""
    return round(round(seconds, 3) * 1000) if math.isfinite(seconds) else 0


def bounded(count: int) -> int:
    """`count`, as a peer claims it, as the store can keep it."""
    return max(0, min(count, _MOST_COUNT))


def finite(value: float) -> float | None:
    """None for what is no finite number: the metrics file has none of these either."""
    return value if math.isfinite(value) else None


def cut(text: str) -> str:
    """`text` with a bounded length, as SQLite can store it."""
    return text[:MOST_TEXT].encode("utf-8", "replace").decode()


class PeerAdded(NamedTuple):
    """A peer has joined for the first time."""

    peer: int
    name: PeerId
    role: Role
    at: int


class PeerChanged(NamedTuple):
    """A line in the journal of a peer."""

    peer: int
    sequence: int
    at: int
    round_number: int
    kind: str
    text: str


class PeerNow(NamedTuple):
    """What the newest change has made of a peer. `sessions`, `strikes`, `failures` are added to its totals.

    `role` and `is_here` None: they stay as they are.
    """

    role: Role | None
    is_here: bool | None
    sessions: int
    strikes: int
    failures: int
    at: int
    kind: str
    sequence: int
    peer: int


class SessionBegun(NamedTuple):
    peer: int
    sequence: int
    at: int
    role: Role
    device: str
    reachability: str | None


class SessionEnded(NamedTuple):
    """The session of the peer that has not ended, if there is one, ends."""

    at: int
    sequence: int
    end: str
    reason: str
    peer: int


class Estimated(NamedTuple):
    peer: int
    sequence: int
    at: int
    flops: float | None
    uplink: float | None
    downlink: float | None
    round_trip: float | None
    microbatch_seconds: float | None


class PlanAdded(NamedTuple):
    """`body`: the replicas (:mod:`coordinator.history.plan_body`)."""

    epoch: int
    sequence: int
    at: int
    from_round: int
    first_sample: int
    replicas: int
    members: int
    reason: str
    body: bytes


class ReplicaPlanned(NamedTuple):
    """`epoch` is the newest plan that includes the replica; `members`: their numbers, such as "3,7"."""

    replica: int
    epoch: int
    members: str


class RoundBegun(NamedTuple):
    """A round begins, or begins anew after :class:`RoundVoid`."""

    round_number: int
    epoch: int
    at: int
    sequence: int


class RoundVoid(NamedTuple):
    """What was offered in the round does not count: another plan divides its samples."""

    round_number: int


class StageRoundNow(NamedTuple):
    """All figures of one (stage, round). `reason` None: not decided."""

    round_number: int
    stage: int
    outcome: int
    decided_at: int | None
    decided_sequence: int
    first_offer_at: int | None
    closed_at: int | None
    closed_sequence: int
    gather: int
    last_report_at: int | None
    contested: int
    offered: int
    counted: int
    payload_bytes: int
    tokens: int
    reason: str | None


class Offered(NamedTuple):
    """A peer offers a payload, or withholds one: then `standing` is WITHHELD."""

    round_number: int
    stage: int
    peer: int
    replica: int
    standing: int
    at: int
    sequence: int
    weight: float
    nbytes: int


class Reported(NamedTuple):
    """A peer holds so many payloads of the (stage, round)."""

    at: int
    sequence: int
    held: int
    round_number: int
    stage: int
    peer: int


class Counted(NamedTuple):
    """The payload of a peer is in the manifest, and stands for so many tokens."""

    tokens: int
    round_number: int
    stage: int
    peer: int


class Credited(NamedTuple):
    """What a committed payload adds to the credit of its owner."""

    tokens: int
    nbytes: int
    first_round: int
    round_number: int
    sequence: int
    peer: int


class LeftOut(NamedTuple):
    """The payload of a peer is not in the manifest. `reason` None: as the decision says."""

    reason: str | None
    reason_sequence: int
    round_number: int
    stage: int
    peer: int


class Missed(NamedTuple):
    """A member has neither offered nor withheld a payload until the decision."""

    round_number: int
    stage: int
    peer: int
    replica: int
    reason: str
    reason_sequence: int


class Decided(NamedTuple):
    """What a decision adds to the totals of the run. `run_tokens`: at stage 0, else 0."""

    committed: int
    aborted: int
    run_tokens: int
    stage_tokens: int


class RoundTokens(NamedTuple):
    """The tokens that are committed at stage 0 of the round."""

    tokens: int
    round_number: int


class RoundDecided(NamedTuple):
    """The round is decided at every stage."""

    at: int
    round_number: int


class Finished(NamedTuple):
    at: int


class Measured(NamedTuple):
    """What one member measured in one round. A second measurement of the same peer and round is ignored."""

    round_number: int
    replica: int
    position: int
    peer: int
    at: int
    is_last: bool
    train_loss: float | None
    validation_loss: float | None
    tokens: int
    inner: int
    outer: int
    compute: int
    gradient_norm: float | None
    steps: int
    extra_steps: int
    microbatches: int
    link_bytes: int
    link_bytes_dense: int
    payload_bytes: int
    payload_bytes_dense: int
    progress_norm: float | None
    error_norm: float | None


class Agreed(NamedTuple):
    """How far a payload agrees with the others, as another peer measured it; the first figure stays."""

    cosine: float | None
    norm: float
    round_number: int
    stage: int
    peer: int


PeerRow: TypeAlias = PeerAdded | PeerChanged | PeerNow | SessionBegun | SessionEnded | Estimated
PlanRow: TypeAlias = PlanAdded | ReplicaPlanned | RoundBegun | RoundVoid | Finished
RoundRow: TypeAlias = (
    StageRoundNow
    | Offered
    | Reported
    | Counted
    | Credited
    | LeftOut
    | Missed
    | Decided
    | RoundTokens
    | RoundDecided
)
Row: TypeAlias = PeerRow | PlanRow | RoundRow | Measured | Agreed
