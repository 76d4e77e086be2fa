"""What can happen to a run: the events that are stored and replayed. Times (`at`) are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocol.types import Capacity, Decision, PayloadDescriptor, PeerId, Plan, Role


@dataclass(frozen=True)
class CoordinatorStarted:
    """Deadlines and silences of earlier date count from here: nobody could report while it was away."""

    at: float


@dataclass(frozen=True)
class PeerJoined:
    at: float
    peer: PeerId
    role: Role
    capacity: Capacity
    endpoint: str


@dataclass(frozen=True)
class PeerSeen:
    """A heartbeat. The only event that is not stored."""

    at: float
    peer: PeerId
    round: int
    inner_step: int


@dataclass(frozen=True)
class PeerLeft:
    at: float
    peer: PeerId
    reason: str
    finished: bool


@dataclass(frozen=True)
class PeerLost:
    at: float
    peer: PeerId
    silent_seconds: float


@dataclass(frozen=True)
class PlanAdopted:
    at: float
    plan: Plan


@dataclass(frozen=True)
class PayloadOffered:
    at: float
    descriptor: PayloadDescriptor


@dataclass(frozen=True)
class PayloadWithheld:
    """A host of the stage is done with its inner phase and has nothing to offer."""

    at: float
    stage: int
    round: int
    peer: PeerId


@dataclass(frozen=True)
class GroupClosed:
    """The group is all that was offered so far from this anchor, in canonical order."""

    at: float
    stage: int
    round: int
    group_id: str
    anchor_digest: str


@dataclass(frozen=True)
class HoldingsReported:
    at: float
    stage: int
    round: int
    peer: PeerId
    owners: tuple[PeerId, ...]


@dataclass(frozen=True)
class RoundCommitted:
    at: float
    decision: Decision


@dataclass(frozen=True)
class RoundAborted:
    at: float
    decision: Decision


@dataclass(frozen=True)
class DigestAttested:
    at: float
    stage: int
    round: int
    part: str
    peer: PeerId
    digest: str


@dataclass(frozen=True)
class AnchorDiverged:
    """`peer` holds another anchor than the others after `round`. `expected` is theirs."""

    at: float
    stage: int
    round: int
    part: str
    peer: PeerId
    digest: str
    expected: str


@dataclass(frozen=True)
class RunFinished:
    at: float


Event: TypeAlias = (
    CoordinatorStarted
    | PeerJoined
    | PeerSeen
    | PeerLeft
    | PeerLost
    | PlanAdopted
    | PayloadOffered
    | PayloadWithheld
    | GroupClosed
    | HoldingsReported
    | RoundCommitted
    | RoundAborted
    | DigestAttested
    | AnchorDiverged
    | RunFinished
)
