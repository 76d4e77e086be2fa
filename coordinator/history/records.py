"""What the history of a run answers: frozen records, which the dashboard, the terminal and reports show.

Times (`at`, and names that end in `_at`) are Unix times in seconds on the clock of the events; durations
are seconds; traffic is bytes; losses are nats per token. A field that ends in `sequence` is the number of an
event in the event log, counted from 1; 0 where there is no such event. Rounds count from 1; round 0 in a
measurement is the model before its first round. None means that a figure is not known.

The records of peers and of their credit are in :mod:`coordinator.history.peer_records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.types import PeerId, Plan


class Outcome(StrEnum):
    """How a (stage, round) ended. SKIPPED: the stage had no turn in the round (outer.turns)."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    SKIPPED = "skipped"


class Standing(StrEnum):
    """What became of the part of one member in a (stage, round).

    OFFERED: there is no decision yet. COUNTED: its payload is in the manifest. LEFT_OUT: it has offered,
    and its payload does not count. WITHHELD: it said that it has no payload. MISSING: the plan includes it,
    and it neither offered nor withheld until the decision.
    """

    OFFERED = "offered"
    COUNTED = "counted"
    LEFT_OUT = "left out"
    WITHHELD = "withheld"
    MISSING = "missing"


@dataclass(frozen=True)
class Page:
    """Which part of a list is wanted: `most` rows after the first `skip`."""

    skip: int = 0
    most: int = 100


@dataclass(frozen=True)
class Traffic:
    """Bytes of one or more members: on links and in payloads, and what dense float32 would have taken."""

    link_bytes: int = 0
    link_bytes_dense: int = 0
    payload_bytes: int = 0
    payload_bytes_dense: int = 0


@dataclass(frozen=True)
class Summary:
    """The whole run in one record.

    Attributes:
        sequence: of the newest event that the history contains; `at` is the time of that event.
        rounds: of the specification.
        rounds_begun: the newest round that has an event; 0 before the first plan.
        rounds_decided: rounds that are decided at every stage.
        tokens: whose training is committed at stage 0.
        stage_tokens: a token that is committed at one stage counts once here: the sum of all credit.
        tokens_per_second: committed tokens of the newest decided rounds, per second of these rounds.
        began_at: of the first plan; None before it. finished_at: None while the run goes on.
        peers: that have joined at least once.
        traffic: as all members together have measured it.
    """

    run: str
    sequence: int
    at: float
    stages: int
    rounds: int
    rounds_begun: int
    rounds_decided: int
    stage_rounds_committed: int
    stage_rounds_aborted: int
    tokens: int
    stage_tokens: int
    tokens_per_second: float
    began_at: float | None
    finished_at: float | None
    peers: int
    plans: int
    traffic: Traffic


@dataclass(frozen=True)
class ReplicaSummary:
    """One replica, over all of its plans, with the newest figures of its last member.

    Attributes:
        first_round, last_round: that it has measured.
        members: of the newest plan that includes it. is_planned: that is the newest plan of the run.
        tokens: trained by the replica, also where its payload did not count.
        tokens_per_second: in `last_round`.
        traffic: of all members and rounds.
    """

    replica: int
    first_round: int
    last_round: int
    members: tuple[PeerId, ...]
    is_planned: bool
    validation_loss: float | None
    train_loss: float | None
    tokens: int
    tokens_per_second: float
    traffic: Traffic


@dataclass(frozen=True)
class LossPoint:
    """The losses of one replica, or the means over all replicas, at a round.

    A thinned list has one point for several rounds: the newest of them. `least` and `greatest` are the
    validation losses of all these rounds and, where no replica was named, of all replicas. They show a spike
    that thinning leaves out. None: not finite or not measured.
    """

    round_number: int
    at: float
    validation_loss: float | None
    train_loss: float | None
    least: float | None
    greatest: float | None


@dataclass(frozen=True)
class SpeedPoint:
    """Committed tokens per second at stage 0; a thinned list has the mean of several rounds.

    `seconds` is from the begin of the first of these rounds to the decisions of the last, whose number is
    `round_number`; `rounds` is how many they are.
    """

    round_number: int
    rounds: int
    at: float
    tokens: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class TrafficPoint:
    """The traffic of one round, by all members or by those that were asked for.

    A thinned list has the mean of `rounds` rounds, of which `round_number` is the last.
    """

    round_number: int
    rounds: int
    at: float
    members: int
    traffic: Traffic


@dataclass(frozen=True)
class MemberFigures:
    """What one member measured in one round: its traffic and its time.

    Attributes:
        position: in the replica. The link from a member goes to the next position; the last member's traffic
            on links is the way back.
        is_last: the losses and `tokens` are those of the replica; else they are None and 0.
        inner_seconds: of the inner phase; compute_seconds: of that, the part in which it computed.
        outer_seconds: that it waited for the exchange.
        steps, extra_steps, microbatches, gradient_norm: as in protocol.status.Measurement.
        progress_norm, error_share: as there, too; None without a payload.
    """

    round_number: int
    at: float
    peer: PeerId
    replica: int
    position: int
    is_last: bool
    train_loss: float | None
    validation_loss: float | None
    tokens: int
    inner_seconds: float
    outer_seconds: float
    compute_seconds: float
    gradient_norm: float | None
    steps: int
    extra_steps: int
    microbatches: int
    progress_norm: float | None
    error_share: float | None
    traffic: Traffic


@dataclass(frozen=True)
class StageSummary:
    """One (stage, round) in a list of rounds. `reason`: a sentence about the decision; "" while open.

    `counted` of `offered` payloads are in the manifest: `payload_bytes` is their size, `tokens` their worth.
    """

    stage: int
    outcome: Outcome
    decided_sequence: int
    decided_at: float | None
    offered: int
    counted: int
    payload_bytes: int
    tokens: int
    reason: str


@dataclass(frozen=True)
class RoundSummary:
    """One round in a list of rounds.

    Attributes:
        epoch: of its plan.
        began_at: when the round before it was decided at every stage, or its plan adopted.
        began_sequence: the event with which it began.
        restarts: how often it began anew with another plan; what was offered before does not count.
        seconds: from `began_at` to its last decision; None while a stage is open.
        tokens: committed at stage 0.
        validation_loss: mean over its replicas.
        stages: in order; a stage without an event yet is not there.
    """

    round_number: int
    epoch: int
    began_at: float
    began_sequence: int
    restarts: int
    seconds: float | None
    tokens: int
    validation_loss: float | None
    stages: tuple[StageSummary, ...]


@dataclass(frozen=True)
class Contribution:
    """The part of one member in one (stage, round).

    Attributes:
        replica: -1 if the plan does not include the peer.
        offered_at, offered_sequence: its offer, or that it withheld.
        reported_at, reported_sequence: its newest report of the payloads that it holds; `held` is how many.
        weight, nbytes: of the payload that it offered; tokens: that it stands for, if it was counted.
        reason: a sentence: why it was not counted; "" if it was, or while the round is open.
        reason_sequence: of the event that the reason comes from.
        cosine, norm: of the payload, as another peer measured it (protocol.status.PayloadAgreement).
    """

    round_number: int
    stage: int
    peer: PeerId
    replica: int
    standing: Standing
    offered_at: float | None
    offered_sequence: int
    reported_at: float | None
    reported_sequence: int
    held: int
    weight: float
    nbytes: int
    tokens: int
    reason: str
    reason_sequence: int
    cosine: float | None
    norm: float | None


@dataclass(frozen=True)
class PhaseSeconds:
    """The seconds of one (stage, round) by what it waited for; None while that phase is not over.

    Attributes:
        inner: from the begin of the round to the first offer.
        offer: from there until the group was closed.
        group: from there to the last report of a member.
        decision: from there to the decision; contested payloads are fetched in this time.
    """

    inner: float | None
    offer: float | None
    group: float | None
    decision: float | None


@dataclass(frozen=True)
class StageRound:
    """All about one (stage, round). `contributions` are sorted by replica, then by peer."""

    summary: StageSummary
    closed_at: float | None
    closed_sequence: int
    gather_seconds: float
    """The time that the group had to gather the payloads."""
    contested: int
    """Payloads that the arbiter was asked for."""
    phases: PhaseSeconds
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class RoundDetail:
    """All about one round. `members`: their measurements, by replica and position."""

    summary: RoundSummary
    stages: tuple[StageRound, ...]
    members: tuple[MemberFigures, ...]


@dataclass(frozen=True)
class PlanSummary:
    """One plan in a list of plans."""

    epoch: int
    sequence: int
    at: float
    from_round: int
    replicas: int
    members: int
    reason: str


@dataclass(frozen=True)
class PlanDetail:
    """One plan as it was adopted. The members' endpoints are left out: they are ""."""

    summary: PlanSummary
    plan: Plan
