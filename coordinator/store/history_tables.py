"""The tables of a run's history: one frozen record for each, from whose fields SQL and reading follow.

A row is a part of what is known under its key: where the table has that key, each column changes by the rule
of its field (:class:`Merge`). So an offer and the report after it are two rows of one contribution, and sums
need no reading. None is a figure that is not known, or that a row does not tell.

Times (`at`, and names that end in `_at`) are Unix times in seconds on the clock of the events; durations are
seconds; losses are nats per token. A field that ends in `sequence` is the number of an event in the event
log, counted from 1. Rounds count from 1; round 0 in a measurement is the model before its first round.

One file because most of it is the list of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Annotated, ClassVar, TypeAlias

from protocol.types import PeerId, Role


class Merge(Enum):
    """The SQL of a column for which another row comes. KEY: the rows of a table differ in these columns."""

    KEY = ""
    NEWEST = "coalesce(excluded.{0}, {0})"
    FIRST = "coalesce({0}, excluded.{0})"
    SUM = "{0} + excluded.{0}"
    LEAST = "min(coalesce({0}, excluded.{0}), coalesce(excluded.{0}, {0}))"
    MOST = "max(coalesce({0}, excluded.{0}), coalesce(excluded.{0}, {0}))"


Sum: TypeAlias = Annotated[int, Merge.SUM]


class StageOutcome(StrEnum):
    """How a (stage, round) ended. SKIPPED: the stage had no turn in the round."""

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


class Kind(StrEnum):
    """What a line of the journal is about: a peer, one of its payloads, or the run."""

    JOINED = "joined"
    ROLE = "role"
    ADDRESSES = "addresses"
    LINK_FAILED = "link failed"
    DRAINS = "drains"
    LEFT = "left"
    LOST = "lost"
    RETREATED = "retreated"
    RESERVED = "reserved"
    STRIKE = "strike"
    WEIGHED = "weighed"
    QUARANTINED = "quarantined"
    BANNED = "banned"
    UNBANNED = "unbanned"
    DIVERGED = "diverged"
    REJECTED = "rejected"
    ARBITRATED = "arbitrated"
    STARTED = "started"
    PLAN = "plan"
    CONTESTED = "contested"
    PAUSED = "paused"
    RESUMED = "resumed"
    ROLLED_BACK = "rolled back"
    CHANGED = "changed"
    ALARM = "alarm"


class Omission(StrEnum):
    """Why a payload is not in a manifest, where no line of the journal says it."""

    UNHELD = "not held"
    DECISION = "decision"
    NO_OFFER = "no offer"


@dataclass(frozen=True)
class TableRow:
    """What the records of all tables have in common."""

    TABLE: ClassVar[str]
    INDICES: ClassVar[tuple[str, ...]] = ()
    IS_ONCE: ClassVar[bool] = False
    """Whether the first row of a key stays. A later one is dropped, with all rows that came with it."""


@dataclass(frozen=True)
class RunTotals(TableRow):
    """The run. `sequence` and `at` are of the newest event in the history, `measured` is the number of bytes
    of the metrics file that are in it. `tokens` are those committed at stage 0; `stage_tokens` counts a token
    once for each stage."""

    TABLE = "run"
    only_row: Annotated[int, Merge.KEY] = 1
    run: str | None = None
    spec: str | None = None
    stages: int | None = None
    sequence: Annotated[int, Merge.MOST] = 0
    at: float | None = None
    measured: Annotated[int, Merge.MOST] = 0
    tokens: Sum = 0
    stage_tokens: Sum = 0


@dataclass(frozen=True)
class PeerTotals(TableRow):
    """A peer. `is_here`: it has joined and not left, nor was it lost; `name` is its public name,
    `owner` the id of whose it is; the other figures are totals of the run.

    `failures` are losses, retreats and divergences. `link_bytes` is what the peer says that it has sent to
    its neighbours: nobody checks it. The rounds are those whose manifests contain a payload of the peer, and
    `credit_sequence` is the event of the last one.
    """

    TABLE = "peers"
    peer: Annotated[PeerId, Merge.KEY]
    role: Role | None = None
    name: str | None = None
    owner: str | None = None
    is_here: bool | None = None
    strikes: Sum = 0
    failures: Sum = 0
    stage_tokens: Sum = 0
    stage_rounds: Sum = 0
    payload_bytes: Sum = 0
    link_bytes: Sum = 0
    first_round: Annotated[int | None, Merge.FIRST] = None
    last_round: int | None = None
    credit_sequence: int | None = None


@dataclass(frozen=True)
class JournalLine(TableRow):
    """An event about a peer, or about the run where `peer` is "". `text` is its sentence for people.

    `stage` is set if the event is about one; `seconds` are those of silence, or of a wait.
    """

    TABLE = "journal"
    INDICES = ("CREATE INDEX journal_in_order ON journal (sequence)",)
    peer: Annotated[PeerId, Merge.KEY]
    sequence: Annotated[int, Merge.KEY]
    at: float
    round_number: int
    kind: Kind
    text: str
    stage: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class EstimatePoint(TableRow):
    """The speed that a peer had measured of itself at one time; 0 if it was not measured."""

    TABLE = "estimates"
    peer: Annotated[PeerId, Merge.KEY]
    sequence: Annotated[int, Merge.KEY]
    at: float
    flops: float | None


@dataclass(frozen=True)
class AdoptedPlan(TableRow):
    """A plan: from which round it is in force, and why it was made."""

    TABLE = "plans"
    epoch: Annotated[int, Merge.KEY]
    sequence: int
    at: float
    from_round: int
    replicas: int
    members: int
    reason: str


@dataclass(frozen=True)
class RoundRow(TableRow):
    """A round: the plan of its last begin, and the events of that and of its first begin. `tokens` are those
    committed at stage 0.

    `begins` counts: a round begins anew with another plan, and then what was offered before does not count.
    """

    TABLE = "rounds"
    round_number: Annotated[int, Merge.KEY]
    epoch: int | None = None
    began_at: float | None = None
    began_sequence: int | None = None
    first_began_at: Annotated[float | None, Merge.FIRST] = None
    first_sequence: Annotated[int | None, Merge.FIRST] = None
    begins: Sum = 0
    decided_at: float | None = None
    tokens: Sum = 0


@dataclass(frozen=True)
class StageRow(TableRow):
    """A (stage, round). `counted` of `offered` payloads are in the manifest: `payload_bytes` is their size,
    `tokens` their worth. `contested` payloads were asked of the arbiter. `reason` is that of the decision."""

    TABLE = "stage_rounds"
    round_number: Annotated[int, Merge.KEY]
    stage: Annotated[int, Merge.KEY]
    outcome: StageOutcome | None = None
    first_offer_at: Annotated[float | None, Merge.LEAST] = None
    closed_at: float | None = None
    closed_sequence: int | None = None
    last_report_at: Annotated[float | None, Merge.MOST] = None
    decided_at: float | None = None
    decided_sequence: int | None = None
    contested: Sum = 0
    offered: Sum = 0
    counted: Sum = 0
    payload_bytes: Sum = 0
    tokens: Sum = 0
    reason: str | None = None


@dataclass(frozen=True)
class Contribution(TableRow):
    """The part of one member in one (stage, round).

    Attributes:
        offered_at, offered_sequence: its offer, or that it withheld.
        reported_at, reported_sequence: its newest report of the payloads that it holds; `held` is how many.
        nbytes: of the payload that it offered; `tokens`: that the payload stands for, if it was counted.
        cosine, norm: of the payload, as another peer measured it (protocol.status.PayloadAgreement).
        cause: why it was not counted, as a :class:`Kind` or :class:`Omission`.
        cause_sequence, culprit: the event of the cause, and the peer that the event is about: the owner, or
            another member of its replica. Queries find both in the journal.
        detail: the reason that the rejecting member or the coordinator gave. `rejections`: how many members.
    """

    TABLE = "contributions"
    INDICES = ("CREATE INDEX contributions_of_peer ON contributions (peer, round_number, stage)",)
    round_number: Annotated[int, Merge.KEY]
    stage: Annotated[int, Merge.KEY]
    peer: Annotated[PeerId, Merge.KEY]
    replica: int | None = None
    standing: Standing | None = None
    offered_at: float | None = None
    offered_sequence: int | None = None
    reported_at: float | None = None
    reported_sequence: int | None = None
    held: int | None = None
    nbytes: int | None = None
    tokens: Sum = 0
    cosine: Annotated[float | None, Merge.FIRST] = None
    norm: Annotated[float | None, Merge.FIRST] = None
    cause: str | None = None
    cause_sequence: int | None = None
    culprit: PeerId | None = None
    detail: str | None = None
    rejections: int | None = None


@dataclass(frozen=True)
class MemberFigures(TableRow):
    """What one member measured in one round (protocol.status.Measurement).

    `position` is that in the replica. The link from a member goes to the next position; the last member's
    traffic on links is the way back. `is_last`: the losses and `tokens` are those of the replica; of another
    member they are None and 0.
    """

    TABLE = "measurements"
    INDICES = ("CREATE UNIQUE INDEX measurements_of_peer ON measurements (peer, round_number)",)
    IS_ONCE = True
    round_number: Annotated[int, Merge.KEY]
    replica: Annotated[int, Merge.KEY]
    position: Annotated[int, Merge.KEY]
    peer: Annotated[PeerId, Merge.KEY]
    at: float
    is_last: bool
    train_loss: float | None
    validation_loss: float | None
    tokens: int
    inner_seconds: float
    outer_seconds: float
    compute_seconds: float
    gradient_norm: float | None
    steps: int
    link_bytes: int
    link_bytes_dense: int
    payload_bytes: int
    payload_bytes_dense: int
    progress_norm: float | None
    error_norm: float | None
    nonfinite_step: int

    @property
    def error_share(self) -> float | None:
        """The part of error feedback in the norms of what the member proposes; None without a payload."""
        if self.progress_norm is None or self.error_norm is None or not self.progress_norm + self.error_norm:
            return None
        return self.error_norm / (self.progress_norm + self.error_norm)


@dataclass(frozen=True)
class ReplicaRound(TableRow):
    """The losses of a replica after a round."""

    TABLE = "replica_rounds"
    replica: Annotated[int, Merge.KEY]
    round_number: Annotated[int, Merge.KEY]
    at: float
    validation_loss: float | None
    train_loss: float | None


@dataclass(frozen=True)
class RoundSums(TableRow):
    """The sums of all measurements of a round; `losses` and `train_losses` count those that are finite."""

    TABLE = "round_figures"
    round_number: Annotated[int, Merge.KEY]
    at: Annotated[float, Merge.MOST]
    members: Sum = 1
    losses: Sum = 0
    validation_sum: Annotated[float, Merge.SUM] = 0.0
    least: Annotated[float | None, Merge.LEAST] = None
    greatest: Annotated[float | None, Merge.MOST] = None
    train_losses: Sum = 0
    train_sum: Annotated[float, Merge.SUM] = 0.0
    link_bytes: Sum = 0
    link_bytes_dense: Sum = 0
    payload_bytes: Sum = 0
    payload_bytes_dense: Sum = 0


@dataclass(frozen=True)
class EvaluatedFigure(TableRow):
    """A figure of the model after a round, as `peer` tells, or the operator where that is "".

    `name` is that of the validation set or task.
    """

    TABLE = "evaluations"
    name: Annotated[str, Merge.KEY]
    metric: Annotated[str, Merge.KEY]
    peer: Annotated[PeerId, Merge.KEY]
    round_number: Annotated[int, Merge.KEY]
    at: float
    value: float


@dataclass(frozen=True)
class EvaluatedSample(TableRow):
    """What the model has made of a prompt after a round: `text` follows `prompt`."""

    TABLE = "samples"
    round_number: Annotated[int, Merge.KEY]
    peer: Annotated[PeerId, Merge.KEY]
    name: Annotated[str, Merge.KEY]
    number: Annotated[int, Merge.KEY]
    prompt: str
    text: str


@dataclass(frozen=True)
class BegunAnew:
    """No row: a round begins anew, so what was offered in it and what was decided does not count."""

    round_number: int


Change: TypeAlias = TableRow | BegunAnew

TABLES: tuple[type[TableRow], ...] = (
    RunTotals,
    PeerTotals,
    JournalLine,
    EstimatePoint,
    AdoptedPlan,
    RoundRow,
    StageRow,
    Contribution,
    MemberFigures,
    ReplicaRound,
    RoundSums,
    EvaluatedFigure,
    EvaluatedSample,
)
