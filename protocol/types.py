"""Types that peers exchange: identifiers and frozen records.

One file because most messages consist of several of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NewType, TypeAlias

from pydantic import Field

PROTOCOL_VERSION = 4
"""The newest that this program speaks. It grows with every incompatible change of messages or rules."""

PeerId = NewType("PeerId", str)
"""A base58 peer id of an ed25519 key. It embeds the public key, so it alone verifies a signature."""


class Role(StrEnum):
    """What a peer offers: one member of a pipeline replica, a whole replica on one host, or a relay."""

    STAGE = "stage"
    REPLICA = "replica"
    RELAY = "relay"


@dataclass(frozen=True)
class RelayAddress:
    """A relay of the run: the peer that its certificate names, and ``host:port``."""

    peer: PeerId
    endpoint: str


class Reachability(StrEnum):
    """How others reach a peer: at its own address, at that of a relay, or not at all, since it only dials."""

    OPEN = "open"
    RELAYED = "relayed"
    DIAL_ONLY = "dial-only"


class Lifecycle(StrEnum):
    """The state of a peer, as the coordinator sees it.

    SYNCING peers load checkpoints, READY ones wait for an assignment, TRAINING ones have one in the plan,
    DRAINING ones leave after their round, and GONE ones have left or are lost.
    """

    SYNCING = "syncing"
    READY = "ready"
    TRAINING = "training"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, order=True)
class StageRange:
    """Contiguous stages ``first <= s < stop`` hosted by one member. ValueError if it is empty."""

    first: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise ValueError(f"empty or negative stage range {self.first}..{self.stop}")

    def __contains__(self, stage: int) -> bool:
        return self.first <= stage < self.stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.stop))

    def __len__(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        return f"{self.first}" if len(self) == 1 else f"{self.first}-{self.stop - 1}"

    @property
    def text(self) -> str:
        return f"stage{'s' * (len(self) > 1)} {self}"


@dataclass(frozen=True)
class Capacity:
    """What a peer can do, as it tells the DHT and the coordinator; 0 means not measured.

    Attributes:
        device: torch device name.
        memory_bytes: free on the device.
        threads: CPU threads that it computes with.
        flops: floating-point operations per second in training the run's layers.
        uplink, downlink: bytes per second that it can send and receive, sustained.
        round_trip: seconds to the coordinator and back.
        main_bytes: free in main memory, where the member can use it in place of the device's.
    """

    device: str
    memory_bytes: int
    threads: int
    flops: float = 0.0
    uplink: float = 0.0
    downlink: float = 0.0
    round_trip: float = 0.0
    main_bytes: Annotated[int, Field(exclude_if=lambda nbytes: not nbytes)] = 0


@dataclass(frozen=True)
class LinkEstimate:
    """What a peer has measured of its connection to the other peer `peer`; 0 means not measured.

    Attributes:
        round_trip: seconds to it and back.
        bandwidth: bytes per second that arrive at it, sustained.
        incoming: bytes per second that arrive from it, sustained. Live traffic measures this alone.
    """

    peer: PeerId
    round_trip: float
    bandwidth: float
    incoming: float = 0.0


@dataclass(frozen=True)
class Estimates:
    """What a peer has measured so far, from probes and from live traffic.

    Attributes:
        microbatch_seconds: per microbatch of its replica in the last inner phase. The first member of a chain
            measures it; 0 from other members and before the first inner phase.
        links: to its neighbours and to possible neighbours.
    """

    capacity: Capacity
    microbatch_seconds: float = 0.0
    links: tuple[LinkEstimate, ...] = ()


@dataclass(frozen=True)
class Member:
    """One peer of a replica and its stages. `endpoint` is ``host:port``, or "" if it only dials.

    `relayed` says that the endpoint is a relay's.
    """

    peer: PeerId
    stages: StageRange
    endpoint: str
    relayed: bool = field(default=False, repr=False)  # saved swarms contain a digest of their plan's repr


class Dialer(StrEnum):
    """Which end of a link opens the stream."""

    UPSTREAM = "upstream"
    DOWNSTREAM = "downstream"


@dataclass(frozen=True)
class Link:
    """The link from member i to member i + 1 of a replica. `k` = 0 sends activations uncompressed."""

    k: int
    dialer: Dialer


@dataclass(frozen=True)
class Replica:
    """An ordered list of members that covers all stages. ``len(links) == len(members) - 1``.

    `weight` is the weight of its payloads in a round; a descriptor with another weight is refused.
    `microbatches` is the number that it computes in one inner step; 0 means the spec's number. `resumes_at`
    is the inner step (0-based) at which it goes on in the first round of its plan, with other members or
    new links, since the plan of epoch `resumed_in`.
    """

    index: int
    members: tuple[Member, ...]
    links: tuple[Link, ...]
    weight: float = 1.0
    microbatches: int = 0
    # Logs of runs before have none; saved swarms contain a digest of their plan's repr.
    resumes_at: Annotated[int, Field(exclude_if=lambda step: not step)] = field(default=0, repr=False)
    resumed_in: Annotated[int, Field(exclude_if=lambda epoch: not epoch)] = field(default=0, repr=False)

    @property
    def name(self) -> str:
        return f"replica-{self.index}"

    @property
    def is_full(self) -> bool:
        """Whether one peer hosts all stages."""
        return len(self.members) == 1

    def host_of(self, stage: int) -> Member:
        """The member that hosts `stage`. Raises ValueError if the replica does not cover it."""
        for member in self.members:
            if stage in member.stages:
                return member
        raise ValueError(f"{self.name} has no host for stage {stage}")

    def position_of(self, peer: PeerId) -> int:
        """Index of `peer` in the chain, or -1."""
        return next((i for i, member in enumerate(self.members) if member.peer == peer), -1)


@dataclass(frozen=True)
class ReservedAssignment:
    """The position in a replica that the coordinator reserves for `peer` in a later plan.

    Until that plan runs, the peer follows the rounds of `stages` and contributes nothing.
    """

    peer: PeerId
    replica: int
    position: int
    stages: StageRange

    @property
    def slot(self) -> tuple[int, int]:
        return self.replica, self.position


@dataclass(frozen=True)
class RunChange:
    """From `from_round` on, settings of the run have other values (protocol.spec.change).

    `settings` are texts such as ``inner.learning_rate=0.001``, with values as JSON. `reason` is a sentence
    for people, or "". In a plan, `first_sample` is the ordinal of the first sample with the new values.
    """

    from_round: int
    settings: tuple[str, ...]
    reason: str
    first_sample: Annotated[int, Field(exclude_if=lambda sample: not sample)] = 0


@dataclass(frozen=True)
class Plan:
    """The replicas that train from round `from_round` on, and the peer of each stage.

    `first_sample` is the ordinal of the first training sample of `from_round` (protocol.math.sampling).
    `reason` is a sentence for people. `changes` are all of the run up to `from_round`, in their order.

    A plan with `repairs` goes on with the round that has begun under the plan of that epoch: it differs in
    replicas that were broken, and what the others do in that round stays valid.
    """

    epoch: int
    from_round: int
    first_sample: int
    replicas: tuple[Replica, ...]
    reason: str
    # Most runs have none, and logs of runs before have no such fields.
    changes: Annotated[tuple[RunChange, ...], Field(exclude_if=lambda changes: not changes)] = ()
    repairs: Annotated[int, Field(exclude_if=lambda epoch: not epoch)] = field(default=0, repr=False)

    def goes_on_from(self, epoch: int) -> bool:
        """Whether its first round has begun under the plan of `epoch`, and goes on under this one."""
        return 0 < self.repairs <= epoch < self.epoch

    def epoch_of_links(self, replica: Replica, round_number: int) -> int:
        """The epoch that greetings and frames of `replica` name in a round.

        Members that know of a repair of another replica, and those that do not yet, name the same.
        """
        is_repair = self.repairs and round_number == self.from_round
        return max(self.repairs, replica.resumed_in) if is_repair else self.epoch

    @property
    def size(self) -> int:
        """How many members it has."""
        return sum(len(replica.members) for replica in self.replicas)

    def replica_of(self, peer: PeerId) -> Replica | None:
        return next((replica for replica in self.replicas if replica.position_of(peer) >= 0), None)


@dataclass(frozen=True)
class PayloadDescriptor:
    """Describes one replica's payload for one (stage, round). The signature covers all other fields.

    Attributes:
        owner: the peer that made and signed the payload.
        anchor_digest: of the anchor from which the pseudo-gradient starts.
        codec: name and parameters of the payload codec.
        weight: of the payload in the round's mean.
        epoch: of the plan under which the payload was made.
    """

    run: str
    stage: int
    round_number: int
    owner: PeerId
    anchor_digest: str
    codec: str
    weight: float
    nbytes: int
    sha256: str
    signature: bytes = b""
    epoch: int = 0  # in logs of version 2


@dataclass(frozen=True)
class Rejection:
    """A payload that its receiver refuses. `reason` is a sentence for people."""

    descriptor: PayloadDescriptor
    reason: str


@dataclass(frozen=True)
class MemberLine:
    """What a member of a group can send and receive for one stage.

    Attributes:
        uplink, downlink: bytes per second, rounded; 0 means not measured.
        is_open: whether others reach it at its own address.
    """

    uplink: int
    downlink: int
    is_open: bool


@dataclass(frozen=True)
class ExchangeGroup:
    """The payloads matched for one (stage, round), in canonical order (by owner).

    Attributes:
        seconds: the time that its members have to gather the payloads; 0 means the spec's ``timing.fetch``.
        lines: of the owner of each descriptor; empty where the coordinator tells none.
    """

    group_id: str
    descriptors: tuple[PayloadDescriptor, ...]
    seconds: float = 0.0
    lines: tuple[MemberLine, ...] = ()


@dataclass(frozen=True)
class ManifestEntry:
    """One payload that counts in a round, and the peers that hold its bytes."""

    descriptor: PayloadDescriptor
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class ResultClaim:
    """What a member of a group holds as the result of a reduction.

    Attributes:
        sha256, nbytes: of the result.
        without: the members of the group of whose payloads no part is in it, ascending.
    """

    sha256: str
    nbytes: int
    without: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class CommittedResult:
    """The result that a round of exchange "reduced" applies, and the peers that hold its bytes."""

    sha256: str
    nbytes: int
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class _Decided:
    """What every decision of a (stage, round) says.

    `next_epoch` names the plan of the next round; `reason` is a sentence for people.
    """

    stage: int
    round_number: int
    next_epoch: int
    reason: str


@dataclass(frozen=True)
class Committed(_Decided):
    """Every replica applies exactly the payloads of `entries`, in canonical order (by owner).

    With `result` it applies these bytes instead, and `entries` are the payloads in them.
    """

    entries: tuple[ManifestEntry, ...]
    result: CommittedResult | None = None


@dataclass(frozen=True)
class Aborted(_Decided):
    """No replica applies anything."""


@dataclass(frozen=True)
class Skipped(_Decided):
    """The stage has no turn in the round (outer.turns), and its progress counts in a later one.

    A message says Aborted: members know the turns from the specification.
    """


@dataclass(frozen=True)
class RolledBack(_Decided):
    """The anchor after this round is that after `restore_round`. All stages of a round are, or none."""

    restore_round: int


Decision: TypeAlias = Committed | Aborted | Skipped | RolledBack
"""The final outcome of a (stage, round)."""


def entries_of(decision: Decision) -> tuple[ManifestEntry, ...]:
    """The payloads that count: none of a decision that commits nothing."""
    return decision.entries if isinstance(decision, Committed) else ()


@dataclass(frozen=True)
class Rollback:
    """The anchors after `round_number` are those after `restore_round`, bit for bit."""

    round_number: int
    restore_round: int


class Finding(StrEnum):
    """What the arbiter found out about a contested payload. HELD: it exists, is valid, and is served."""

    HELD = "held"
    NOT_FOUND = "not-found"
    INVALID = "invalid"


@dataclass(frozen=True)
class Verdict:
    """The result of an arbitration.

    Attributes:
        reason: a sentence for people; "" if the payload is held.
        refuted: peers whose own answer to the arbiter was that they do not hold the payload, or other bytes.
    """

    finding: Finding
    reason: str = ""
    refuted: tuple[PeerId, ...] = ()


class PausedBy(StrEnum):
    """Who has paused a run: its operator, or an alarm of the coordinator."""

    OPERATOR = "operator"
    ALARM = "alarm"


@dataclass(frozen=True)
class Pause:
    """The run is paused: no inner phase of `from_round` or a later round begins before it is resumed.

    The round before it, if it is open, still ends. `reason` is a sentence for people, or "".
    """

    from_round: int
    by: PausedBy
    reason: str

    def holds(self, round_number: int) -> bool:
        """Whether no inner phase of this round may begin."""
        return round_number >= self.from_round


class Part(StrEnum):
    """The part of a stage in a checkpoint record: the whole stage, or the embedding of stage 0 alone.

    SNAPSHOT is the embedding as links use it (protocol.math.embedding_snapshot), and COPY what a peer without
    stage 0 has fetched of it, under which no bytes are served.
    """

    STAGE = "stage"
    EMBEDDING = "embedding"
    SNAPSHOT = "snapshot"
    COPY = "copy"


@dataclass(frozen=True)
class StateRecord:
    """An anchor that peers keep in a checkpoint, as the coordinator signs it.

    `digest` is that of the anchor after `round_number`. `holders` are live peers that have attested it.
    """

    run: str
    stage: int
    part: Part
    round_number: int
    digest: str
    holders: tuple[PeerId, ...]


class FrameKind(StrEnum):
    """What a frame on a link carries. BACKWARD and NORM flow upstream, the others downstream.

    A PHASE frame tells whether another inner step follows.
    """

    PHASE = "phase"
    FORWARD = "forward"
    EVALUATE = "evaluate"
    STEP = "step"
    BACKWARD = "backward"
    NORM = "norm"


@dataclass(frozen=True, order=True)
class FrameId:
    """Names one frame of one run. Equal ids are the same work, so the receiver drops a repeated frame."""

    epoch: int
    round_number: int
    step: int
    microbatch: int
    kind: FrameKind


class DType(StrEnum):
    """Element types on links and in checkpoints."""

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    I8 = "i8"
    U8 = "u8"
    U16 = "u16"
    I32 = "i32"

    @property
    def itemsize(self) -> int:
        return {"f64": 8, "f32": 4, "bf16": 2, "i8": 1, "u8": 1, "u16": 2, "i32": 4}[self.value]


@dataclass(frozen=True)
class TensorHeader:
    """Name, element type and shape of one tensor whose bytes follow, little-endian and row-major."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Frame:
    """One message of a link: its id, the tensors in it and their bytes, concatenated in order."""

    id: FrameId
    tensors: tuple[TensorHeader, ...]
    payload: bytes
