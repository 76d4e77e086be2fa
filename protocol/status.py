"""The status of a run: one frozen record, which the coordinator builds and every view renders.

The command line, the live view of a local swarm and the metrics file all read these records. They travel as
the messages StatusReply and Measurement (protocol.wire.status). One file because the status is one record of
several others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from protocol.spec.run import RunSpec
from protocol.types import (
    Estimates,
    Lifecycle,
    Link,
    Pause,
    PeerId,
    Plan,
    Reachability,
    Role,
    Rollback,
    RunChange,
    StageRange,
)


class RunPhase(StrEnum):
    """Where a run is in its life: it waits for its first peers, trains, or is over."""

    GATHERING = "gathering"
    TRAINING = "training"
    FINISHED = "finished"


class Wait(StrEnum):
    """What a node waits for."""

    ASSIGNMENT = "assignment"
    """A place in the run, of which the plan or the next one makes use."""
    PLAN = "plan"
    """The plan of the next round."""
    LINKS = "links"
    """The links to its neighbours, while they are opened."""
    NEIGHBOUR = "neighbour"
    """The next frame of a neighbour."""
    GROUP = "group"
    """The offers of the other replicas."""
    PAYLOADS = "payloads"
    """The payloads of the other replicas."""
    DECISION = "decision"
    """The reports of the others, and the coordinator's decision on the round."""
    CHECKPOINT = "checkpoint"
    """A checkpoint of other peers."""
    PAUSE = "pause"
    """The end of a pause of the run."""


class CauseCode(StrEnum):
    """The kind of a cause. Each is followed by the fields of :class:`Cause` that it uses."""

    # What a run does or waits for.
    PEERS_LACKING = "peers-lacking"  # causes, one PEERS_LACKING for each role: role, count, total
    SPEED_UNKNOWN = "speed-unknown"  # peers
    ENDPOINT_LACKING = "endpoint-lacking"  # peers: stage peers that cannot be neighbours
    HOST_LACKING = "host-lacking"  # peers: hosts of a stage that cannot exchange payloads
    MEMORY_LACKING = "memory-lacking"  # count, total: bytes that are needed and given; detail
    STARTING = "starting"
    TRAINING = "training"  # round_number, total
    OFFERS_LACKING = "offers-lacking"  # round_number, total, replicas, stages
    PAYLOADS_CONTESTED = "payloads-contested"  # round_number, total, count, stages
    REPORTS_LACKING = "reports-lacking"  # round_number, total, replicas, stages
    DIGESTS_LACKING = "digests-lacking"  # round_number, total, peers or stages
    NO_EXCHANGE = "no-exchange"  # round_number, total, peers
    NO_REPLICA = "no-replica"  # round_number, total, causes
    PAUSED = "paused"  # round_number, total
    DISK_FULL = "disk-full"  # detail: that of the coordinator
    FINISHED = "finished"  # total
    # Why a replica cannot train.
    OBSTRUCTED = "obstructed"  # replicas, causes: it and all that it lacks; count, total: steps offered
    VACANT = "vacant"  # stages
    MEMBER_GONE = "member-gone"  # peers, stages; detail "rests" if its process does
    MEMBER_DRAINS = "member-drains"  # peers, stages
    MEMBER_RESTS = "member-rests"  # peers, stages, round_number, count
    MEMBER_SYNCS = "member-syncs"  # peers, stages
    LINK_CLOSED = "link-closed"  # peers (both ends), detail, address
    REPLICA_RESTS = "replica-rests"  # round_number
    FRAME_REFUSED = "frame-refused"  # peers (receiver, sender), replicas, detail, round_number
    NO_PAYLOAD = "no-payload"  # round_number: the last with a payload; replicas; peers that are apart
    # Why a peer does not train.
    SPARE = "spare"
    FOLLOWS = "follows"  # stages, causes
    SPARES_KEPT = "spares-kept"  # count
    NEXT_PLAN = "next-plan"
    COORDINATOR_BEHIND = "coordinator-behind"  # round_number: the newest that the peer knows
    DISCOUNTED = "discounted"  # it trains, and its payloads count for nothing
    # What stops a run.
    ALARM = "alarm"  # round_number, count: the last healthy round, or 0; detail


STALLS = frozenset(
    (
        *(CauseCode.PEERS_LACKING, CauseCode.SPEED_UNKNOWN, CauseCode.ENDPOINT_LACKING),
        *(CauseCode.HOST_LACKING, CauseCode.MEMORY_LACKING, CauseCode.STARTING, CauseCode.NO_REPLICA),
        CauseCode.DISK_FULL,
    )
)
"""The causes for which a run cannot go on before a peer joins or returns, or a person acts."""


@dataclass(frozen=True)
class Cause:
    """One cause; which fields it uses depends on its code.

    Attributes:
        total: of the rounds of the run, or of the peers of a role that it needs.
        detail: what others said of it, as text: a reason that a peer or a library gave.
        causes: those that it follows from.
    """

    code: CauseCode
    peers: tuple[PeerId, ...] = ()
    replicas: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    round_number: int = 0
    count: int = 0
    total: int = 0
    role: Role | None = None
    address: str = ""
    detail: str = ""
    causes: tuple[Cause, ...] = ()


class AlarmMode(StrEnum):
    """What an alarm about the training does: it pauses the run, only warns, or is not raised."""

    PAUSE = "pause"
    WARN = "warn"
    OFF = "off"


@dataclass(frozen=True)
class PayloadAgreement:
    """What a host of a stage measured of the payload of another host (node.agreement.meter).

    A cosine is None if it cannot be told.

    Attributes:
        cosine: with the weighted mean of the other payloads that count in the round.
        norm: L2 norm of the payload.
        mean_norm: L2 norm of the mean of all payloads, before a radial merge.
        alike, unlike: the cosine with one other payload of the same kind of replica (full or pipeline), and
            with one of the other kind.
        likeness: the greatest cosine with another payload that counts in this round, with one that counted
            in one of the last rounds, or with the weighted sum of one of these rounds.
    """

    stage: int
    owner: PeerId
    cosine: float | None = None
    norm: float = 0.0
    mean_norm: float = 0.0
    alike: float | None = None
    unlike: float | None = None
    likeness: float | None = None


@dataclass(frozen=True)
class Measurement:
    """What one member measured in one round. Byte counts are of this round alone.

    Round 0 is the model before the first round. The losses and `tokens` are valid if `complete` is set,
    which only the last member of a replica does.

    Attributes:
        train_loss: mean over the inner phase, in nats per token.
        validation_loss: in the replica's own forward mode, in nats per token.
        tokens: trained by the replica.
        link_bytes_dense, payload_bytes_dense: what uncompressed float32 would have taken.
        steps: inner steps of the round, without `extra_steps`.
        extra_steps: inner steps that were trained while the coordinator was away.
        microbatches: of each inner step.
        compute_seconds: of the inner phase in which this member computed.
        progress_norm: L2 norm of what this member's stages learned in the round: anchor - local.
        error_norm: L2 norm of the error feedback that its payloads add to this; both before compression, 0
            if no payload of this member counts.
        agreements: of each hosted stage in which this member contributes, the payload that it measures for
            all, then others.
        nonfinite_step: the first inner step, from 1, in which values of this member were not finite, or 0.
    """

    peer: PeerId
    round_number: int
    replica: int
    position: int
    train_loss: float = 0.0
    validation_loss: float = 0.0
    tokens: int = 0
    inner_seconds: float = 0.0
    outer_seconds: float = 0.0
    link_bytes_sent: int = 0
    link_bytes_dense: int = 0
    payload_bytes: int = 0
    payload_bytes_dense: int = 0
    gradient_norm: float = 0.0
    complete: bool = False
    steps: int = 0
    extra_steps: int = 0
    microbatches: int = 0
    compute_seconds: float = 0.0
    progress_norm: float = 0.0
    error_norm: float = 0.0
    agreements: tuple[PayloadAgreement, ...] = ()
    nonfinite_step: int = 0

    @property
    def error_share(self) -> float | None:
        """The part of error feedback in what is proposed, from 0 to 1; None without a payload.

        |beta e| / (|beta e| + |anchor - local|): the norm of their sum may be smaller than either.
        """
        both = self.error_norm + self.progress_norm
        return self.error_norm / both if 0 < both < math.inf else None


@dataclass(frozen=True)
class Waiting:
    """A peer without an invite that waits until an open run has room. Places count from 1.

    Attributes:
        seconds: until its turn, as far as that can be told.
    """

    peer: PeerId
    place: int
    seconds: float | None


class PeerActivity(StrEnum):
    """What a peer does for its run."""

    TRAINS = "trains"
    FOLLOWS = "follows"
    SPARE = "spare"
    RELAY = "relay"
    DRAINS = "drains"
    RESTS = "rests"
    GONE = "gone"


class Exclusion(StrEnum):
    """Why a peer may not take part."""

    BANNED = "banned"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class PeerStatus:
    """One peer that has joined.

    Attributes:
        round_number: the round that its last heartbeat named; 0 before any.
        seconds_since_seen: since the coordinator heard of it last.
        assignment: such as "replica-1, stage 0"; "" without one.
        problem: what does not answer at its addresses, as text; or "".
        role_reason: a sentence: why the coordinator has chosen this role; "" for a role that binds.
        rests: it is gone, but its process rests and may come back.
        cause: why it does not train while the run trains; None if it trains.
        waits: what it waited for when it sent its last heartbeat.
        name: public, or "".
        failures: in a row, by which it has given up its part.
        exclusion, exclusion_reason: None for a peer that may take part; the reason is text, or "".
    """

    peer: PeerId
    role: Role
    lifecycle: Lifecycle
    round_number: int
    inner_step: int
    seconds_since_seen: float
    assignment: str
    estimates: Estimates
    reachability: Reachability = Reachability.OPEN
    problem: str = ""
    role_reason: str = ""
    rests: bool = False
    cause: Cause | None = None
    waits: tuple[Wait, ...] = ()
    name: str = ""
    strikes: int = 0
    failures: int = 0
    exclusion: Exclusion | None = None
    exclusion_reason: str = ""

    @property
    def activity(self) -> PeerActivity:
        """What it does, in one word."""
        if self.lifecycle is Lifecycle.GONE:
            return PeerActivity.RESTS if self.rests else PeerActivity.GONE
        if self.role is Role.RELAY:
            return PeerActivity.RELAY
        match self.lifecycle:
            case Lifecycle.TRAINING:
                return PeerActivity.TRAINS
            case Lifecycle.DRAINING:
                return PeerActivity.DRAINS
            case _:
                return PeerActivity.FOLLOWS if self.assignment else PeerActivity.SPARE


@dataclass(frozen=True)
class Statement:
    """One thing that an answer about a run says; which fields it uses depends on its code.

    Attributes:
        code: its kind (coordinator.ops.explain.statements).
        text: its sentence, for people.
        events: the numbers in the event log of the events that it follows from.
        figures: by name: seconds, bytes per second, FLOP/s, or how many.
        detail: what others said, as text, or a word of the program.
        cause: what the run or a peer waits for.
    """

    code: str
    text: str = ""
    events: tuple[int, ...] = ()
    peers: tuple[PeerId, ...] = ()
    replicas: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    role: Role | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    cause: Cause | None = None


@dataclass(frozen=True)
class Explanation:
    """The answer to one question about a run: its title, then statements, the most important first."""

    title: Statement
    statements: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class ModelSample:
    """What the model has made of a prompt: `text` follows it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class ModelEvaluation:
    """What the model could do after a round, as one peer tells; "" is the operator.

    Attributes:
        name: of the validation set or task, or of the prompts.
        figures: by metric, such as "loss" in nats per token; finite.
    """

    peer: PeerId
    round_number: int
    name: str
    figures: Mapping[str, float]
    samples: tuple[ModelSample, ...] = ()

    @property
    def key(self) -> tuple[PeerId, str]:
        """The newest counts of each."""
        return self.peer, self.name


class ReplicaState(StrEnum):
    """What a replica does in the open round."""

    TRAINS = "trains"
    OFFERED = "offered"
    """It has trained, and waits for the payloads of others."""
    EXCHANGES = "exchanges"
    DECIDED = "decided"
    PAUSED = "paused"
    DONE = "done"
    BROKEN = "broken"
    """It cannot train: its cause says why."""
    READY = "ready"
    """It is in no plan yet, and the next plan includes it."""
    GONE = "gone"
    """It is in no plan, and nothing is reserved for it."""


@dataclass(frozen=True)
class Place:
    """One position of a replica: its stages, and the peer that has it or for which it is reserved."""

    stages: StageRange
    peer: PeerId | None


@dataclass(frozen=True)
class ReplicaFigures:
    """What the members of a replica have measured in the newest round of its last member.

    Bytes are those of all its members. Losses are in nats per token.
    """

    members: int
    round_number: int
    validation_loss: float
    train_loss: float
    tokens_per_second: float
    inner_seconds: float
    outer_seconds: float
    link_bytes_sent: int
    link_bytes_dense: int
    payload_bytes: int
    payload_bytes_dense: int


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica: those of the plan of the open round, those with reservations, and those that measured.

    Attributes:
        places: in the order of the chain; empty for a replica that is gone.
        is_planned: whether it is in the plan of the open round.
        links: from each member to the next, by the plan.
        microbatches: of one inner step, by the plan.
        progress: the share of its inner steps that it has done in the open round.
        cause: why it cannot train, or that it delivers nothing; None if neither.
        figures: None before its last member has measured.
    """

    index: int
    state: ReplicaState
    places: tuple[Place, ...]
    is_planned: bool
    links: tuple[Link, ...] = ()
    microbatches: int = 0
    progress: float = 0.0
    cause: Cause | None = None
    figures: ReplicaFigures | None = None


class Sign(StrEnum):
    """What a finding is about."""

    LOSS = "loss"
    AGREEMENT = "agreement"
    NORM = "norm"
    ERROR_FEEDBACK = "error feedback"
    KINDS = "kinds"


@dataclass(frozen=True)
class HealthFinding:
    """Something unusual in a round.

    Attributes:
        sentence: for people.
        of_run: whether it concerns most of the run, and not only single peers or replicas.
        raises_alarm: whether it alone is a reason to stop.
        peers, replicas, stages: those that it is about.
        value: the figure that is unusual, at the first of the stages; None for a loss that is no number.
        usual: what it is compared with.
        sigmas: how far apart the two are, in robust standard deviations, where that is known.
    """

    sign: Sign
    sentence: str = ""
    of_run: bool = False
    raises_alarm: bool = False
    peers: tuple[PeerId, ...] = ()
    replicas: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    value: float | None = None
    usual: float | None = None
    sigmas: float = 0.0


@dataclass(frozen=True)
class StageHealth:
    """How far the payloads of one stage agree in a round (PayloadAgreement). None: it cannot be told.

    Attributes:
        payloads: that were measured.
        cosine, least_cosine: the median and the least of their cosines with the mean of the others.
        full_cosine, pipeline_cosine: the means over the payloads of full and of pipeline replicas.
        alike, unlike: mean cosine of two payloads of the same kind of replica, and of different kinds.
        norm: their median norm.
        mean_norm: norm of the committed mean.
    """

    stage: int
    payloads: int
    cosine: float | None
    least_cosine: float | None
    full_cosine: float | None
    pipeline_cosine: float | None
    alike: float | None
    unlike: float | None
    norm: float
    mean_norm: float


@dataclass(frozen=True)
class TrainingHealth:
    """The health of the training in the newest round that was judged (coordinator.ops.health).

    Attributes:
        error_share: median part of error feedback in what members propose, from 0 to 1.
        findings: what is unusual.
    """

    round_number: int
    stages: tuple[StageHealth, ...]
    error_share: float | None
    findings: tuple[HealthFinding, ...]


@dataclass(frozen=True)
class RunStatus:
    """The whole status of one run.

    Attributes:
        run: the id of the run.
        cause: what the run does or waits for.
        rounds_decided: rounds that are decided at every stage.
        stage_rounds_committed: decisions of one (stage, round) that committed payloads.
        replicas: by index.
        measurements: the newest of each member.
        plan: the newest; None before the run has started.
        anchors_agree: whether no live peer has an anchor that differs from that of the others.
        time: Unix time of the coordinator's clock.
        parameters: of the model, all stages together.
        round_number: the open round; 0 before the run has started, the number of rounds + 1 after the last.
        round_seconds: since the open round began; 0 while none is open.
        expected_round_seconds: of the open round as a whole, from the last ones; None while nothing tells.
        remaining_seconds: until the run is finished, if it goes on as in its last rounds; None while nothing
            tells, or while it cannot go on.
        tokens_committed: tokens whose training is committed.
        pause: None while the run is not paused.
        health: None before a round was judged.
        alarm: what an alarm has seen; None without one, and after the operator has decided to go on.
        committed_at: Unix time of the last commit; 0 before the first.
        rollbacks: the last ones, the newest first.
        waiting: peers without an invite that wait for room in an open run, in order.
        changes: of settings, also those of rounds to come. `spec` has what holds in the current one.
        term: of the coordinator (protocol.trust.term), later after each take-over.
        evaluations: the newest of each peer and name, the newest rounds first; samples of one alone.
    """

    run: str
    spec: RunSpec
    phase: RunPhase
    cause: Cause
    rounds_decided: int
    stage_rounds_committed: int
    stage_rounds_aborted: int
    peers: tuple[PeerStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    measurements: tuple[Measurement, ...]
    plan: Plan | None
    anchors_agree: bool
    time: float
    parameters: int = 0
    round_number: int = 0
    round_seconds: float = 0.0
    expected_round_seconds: float | None = None
    remaining_seconds: float | None = None
    tokens_committed: int = 0
    pause: Pause | None = None
    health: TrainingHealth | None = None
    alarm: Cause | None = None
    committed_at: float = 0.0
    rollbacks: tuple[Rollback, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    changes: tuple[RunChange, ...] = ()
    term: int = 0
    evaluations: tuple[ModelEvaluation, ...] = ()

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats of a peer."""
        live = sum(peer.lifecycle is not Lifecycle.GONE for peer in self.peers)
        return self.spec.timing.heartbeat_of(live)

    @property
    def rounds_message(self) -> str:
        """How the rounds went, for people."""
        anchors = "agree" if self.anchors_agree else "DIFFER"
        committed, aborted = self.stage_rounds_committed, self.stage_rounds_aborted
        return f"{committed} stage rounds committed, {aborted} aborted, anchors {anchors}"

    @property
    def is_stalled(self) -> bool:
        """Whether the run has begun and cannot go on before a peer joins or returns."""
        return self.phase is RunPhase.TRAINING and self.cause.code in STALLS

    @property
    def is_held(self) -> bool:
        """Whether the run is paused and its open round has not begun."""
        return self.pause is not None and self.pause.holds(self.round_number)

    @property
    def figures(self) -> dict[int, ReplicaFigures]:
        """By index: what the replicas have measured, of those that have."""
        return {each.index: each.figures for each in self.replicas if each.figures is not None}

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas of the plan together, each in the newest round that it has measured."""
        planned = (each.figures for each in self.replicas if each.is_planned)
        return sum(each.tokens_per_second for each in planned if each)

    @property
    def validation_loss(self) -> float | None:
        """The mean over the replicas of the plan, in nats per token; None before a round was measured."""
        losses = [
            each.figures.validation_loss
            for each in self.replicas
            if each.is_planned and each.figures and each.figures.round_number
        ]
        known = [loss for loss in losses if math.isfinite(loss)]
        return sum(known) / len(known) if known else None

    @property
    def replicas_planned(self) -> int:
        """How many replicas the plan of the open round has."""
        return sum(each.is_planned for each in self.replicas)

    @property
    def replicas_broken(self) -> int:
        """How many of them cannot train."""
        return sum(each.is_planned and each.state is ReplicaState.BROKEN for each in self.replicas)

    @property
    def activities(self) -> dict[str, int]:
        """How many peers do what."""
        return dict(Counter(peer.activity.value for peer in self.peers))

    @property
    def steps_done(self) -> int:
        """Inner steps that every member has done, by its heartbeats or, if newer, its measurements."""
        steps = self.spec.inner.steps
        training = (peer for peer in self.peers if peer.round_number)
        done = {peer.peer: (peer.round_number - 1) * steps + peer.inner_step for peer in training}
        for each in self.measurements:
            done[each.peer] = max(done.get(each.peer, 0), each.round_number * steps)
        return min(done.values(), default=0)


def fields_of(measurement: Measurement) -> dict[str, Any]:
    """The fields as the wire and the metrics file name them: there a round's number is called "round"."""
    return {key.removesuffix("_number"): value for key, value in asdict(measurement).items()}
