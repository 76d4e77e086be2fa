"""The words of the protocol: identifiers and the frozen records that travel between parties."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

PROTOCOL_VERSION = 2
"""Raised with every incompatible change of the wire or of the arithmetic. Peers must agree exactly."""

PeerId = NewType("PeerId", str)
"""base58 libp2p peer id of an ed25519 key; it embeds the public key, so signatures verify against it."""


class Role(StrEnum):
    """What a peer offers: one member of a pipeline replica, or a whole replica on one host."""

    STAGE = "stage"
    REPLICA = "replica"


class Lifecycle(StrEnum):
    """Where a peer is in its life, as the coordinator sees it."""

    JOINING = "joining"
    SYNCING = "syncing"
    READY = "ready"
    TRAINING = "training"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, order=True)
class StageRange:
    """Contiguous stages ``first <= s < stop`` hosted by one member."""

    first: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise ValueError(f"empty or negative stage range {self.first}..{self.stop}")

    def __contains__(self, stage: int) -> bool:
        return self.first <= stage < self.stop

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(self.first, self.stop))

    def __len__(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        return f"{self.first}" if len(self) == 1 else f"{self.first}-{self.stop - 1}"


@dataclass(frozen=True)
class Capacity:
    """What a peer can do, as published in its DHT record and told to the coordinator; 0 is not measured.

    Attributes:
        device: torch device name.
        memory_bytes: free on the device.
        threads: CPU threads that it computes with.
        flops: floating-point operations per second that it achieves in training the run's layers.
        uplink: bytes per second that it can send, sustained.
        downlink: bytes per second that it can receive, sustained.
        round_trip: seconds to the coordinator and back.
    """

    device: str
    memory_bytes: int
    threads: int
    flops: float = 0.0
    uplink: float = 0.0
    downlink: float = 0.0
    round_trip: float = 0.0


@dataclass(frozen=True)
class LinkEstimate:
    """What a peer has measured towards another one; 0 is not measured.

    Attributes:
        peer: the other one.
        round_trip: seconds there and back.
        bandwidth: bytes per second that arrive there, sustained.
        incoming: bytes per second that arrive here from there, sustained; live traffic tells only this.
    """

    peer: PeerId
    round_trip: float
    bandwidth: float
    incoming: float = 0.0


@dataclass(frozen=True)
class Estimates:
    """What a peer has measured so far, from probes and from live traffic; told anew when it has changed.

    Attributes:
        capacity: its own.
        microbatch_seconds: what one microbatch took its replica in the last inner phase, from the first
            member's view; 0 from others, and before.
        links: towards neighbours and those that may become neighbours.
    """

    capacity: Capacity
    microbatch_seconds: float = 0.0
    links: tuple[LinkEstimate, ...] = ()


@dataclass(frozen=True)
class Member:
    """One peer of a replica and its stages. `endpoint` is ``host:port``, or "" if it only dials."""

    peer: PeerId
    stages: StageRange
    endpoint: str


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

    `weight` is what its payloads weigh in a round; a descriptor with another weight is refused.
    `microbatches` of an inner step are this replica's share of the work; 0 is the spec's number.
    """

    index: int
    members: tuple[Member, ...]
    links: tuple[Link, ...]
    weight: float = 1.0
    microbatches: int = 0

    @property
    def name(self) -> str:
        return f"replica-{self.index}"

    def host_of(self, stage: int) -> Member:
        """The member that hosts `stage`; ValueError where the replica does not cover it."""
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
        """Replica and position."""
        return self.replica, self.position


@dataclass(frozen=True)
class Plan:
    """Who does what from round `from_round` on.

    `first_sample` is the ordinal of the first training sample of `from_round`: with `from_round`, the
    replicas' order and the samples of one replica in a round it fixes every sample range of this plan
    (see node.data.shards). `reason` is the sentence shown to people.
    """

    epoch: int
    from_round: int
    first_sample: int
    replicas: tuple[Replica, ...]
    reason: str

    def replica_of(self, peer: PeerId) -> Replica | None:
        return next((replica for replica in self.replicas if replica.position_of(peer) >= 0), None)


@dataclass(frozen=True)
class PayloadDescriptor:
    """The envelope of one replica's pseudo-gradient for one (stage, round). The signature covers the rest."""

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


@dataclass(frozen=True)
class Rejection:
    """A payload that its receiver will not use. `reason` is the sentence shown to people."""

    descriptor: PayloadDescriptor
    reason: str


@dataclass(frozen=True)
class ExchangeGroup:
    """The peers matched for one (stage, round), in canonical order (by owner).

    `seconds` is how long its members may take to gather the payloads; 0 leaves it to the spec.
    """

    group_id: str
    descriptors: tuple[PayloadDescriptor, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class ManifestEntry:
    """One payload that counts, and who is known to hold its bytes."""

    descriptor: PayloadDescriptor
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class Decision:
    """The one and final outcome of a (stage, round).

    Committed: `entries` in canonical order (by owner); every replica applies exactly these.
    Aborted: no entries; nobody applies anything. `reason` says why in a sentence. `next_epoch` names the
    plan under which the next round runs.
    """

    stage: int
    round_number: int
    committed: bool
    entries: tuple[ManifestEntry, ...]
    next_epoch: int
    reason: str


class Part(StrEnum):
    """What is digested, attested and handed on of a stage: all of it, or of stage 0 the embedding alone."""

    STAGE = "stage"
    EMBEDDING = "embedding"


@dataclass(frozen=True)
class StateRecord:
    """An anchor that peers keep in a checkpoint: what the coordinator says of it under its signature.

    `digest` is that of the anchor after `round` (protocol.algorithm.digest), `holders` are live peers that attested it.
    """

    run: str
    stage: int
    part: Part
    round_number: int
    digest: str
    holders: tuple[PeerId, ...]


class FrameKind(StrEnum):
    """What a frame on a link carries. BACKWARD and NORM flow upstream, the others downstream.

    PHASE says whether one more inner step follows.
    """

    PHASE = "phase"
    FORWARD = "forward"
    EVALUATE = "evaluate"
    STEP = "step"
    BACKWARD = "backward"
    NORM = "norm"


@dataclass(frozen=True, order=True)
class FrameId:
    """Names one frame of one run; equal ids are the same work, so a repeated frame is dropped."""

    epoch: int
    round_number: int
    step: int
    microbatch: int
    attempt: int
    kind: FrameKind


class DType(StrEnum):
    """Element types that may cross a link or stand in a checkpoint."""

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
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Frame:
    """One message of a link: its id, the tensors in it and their bytes, concatenated in order."""

    id: FrameId
    tensors: tuple[TensorHeader, ...]
    payload: bytes


@dataclass(frozen=True)
class PeerRecord:
    """What a peer says of itself in the DHT, signed with its identity."""

    peer: PeerId
    protocol_version: int
    role: Role
    capacity: Capacity
    endpoint: str
    stages: StageRange | None
