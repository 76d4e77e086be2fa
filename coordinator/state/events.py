"""Events: what has happened to a run, as it is stored and replayed. Times (`at`) are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocol.types import (
    Capacity,
    Decision,
    Estimates,
    PayloadDescriptor,
    PeerId,
    Plan,
    ReservedAssignment,
    Role,
)


@dataclass(frozen=True)
class CoordinatorStarted:
    """Deadlines and silence that began before count from here: no peer could report meanwhile."""

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
    round_number: int
    inner_step: int


@dataclass(frozen=True)
class PeerLeft:
    at: float
    peer: PeerId
    reason: str
    finished: bool


@dataclass(frozen=True)
class PeerMeasured:
    """The estimates of `peer` have changed."""

    at: float
    peer: PeerId
    estimates: Estimates


@dataclass(frozen=True)
class PeerDraining:
    """`peer` leaves at the end of its round: no later plan assigns it."""

    at: float
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PeerLost:
    at: float
    peer: PeerId
    silent_seconds: float


@dataclass(frozen=True)
class PeerRetreated:
    """`peer` cannot train under plan `epoch`: it follows until a later plan assigns it."""

    at: float
    peer: PeerId
    epoch: int
    reason: str


@dataclass(frozen=True)
class AssignmentReserved:
    """`reservation` replaces the former one of its peer, and that of another peer for the same slot."""

    at: float
    reservation: ReservedAssignment


@dataclass(frozen=True)
class InviteCreated:
    """`secret_sha256` (hex) is all that is kept of the secret. `role` None permits any."""

    at: float
    invite: str
    secret_sha256: str
    uses: int
    expires_at: float
    role: Role | None


@dataclass(frozen=True)
class InviteUsed:
    """`peer` is enrolled from now on: it may have certificates until it is banned."""

    at: float
    invite: str
    peer: PeerId


@dataclass(frozen=True)
class InviteRevoked:
    at: float
    invite: str


@dataclass(frozen=True)
class PeerBanned:
    at: float
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PeerUnbanned:
    at: float
    peer: PeerId


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
    """A host of the stage has ended its inner phase and offers no payload."""

    at: float
    stage: int
    round_number: int
    peer: PeerId


@dataclass(frozen=True)
class GroupClosed:
    """The group is all that was offered so far from this anchor, in canonical order.

    Its members have `seconds` to gather the payloads.
    """

    at: float
    stage: int
    round_number: int
    group_id: str
    anchor_digest: str
    seconds: float


@dataclass(frozen=True)
class HoldingsReported:
    at: float
    stage: int
    round_number: int
    peer: PeerId
    owners: tuple[PeerId, ...]


@dataclass(frozen=True)
class PayloadRejected:
    """`peer` rejects the payload of `owner`."""

    at: float
    stage: int
    round_number: int
    peer: PeerId
    owner: PeerId
    reason: str


@dataclass(frozen=True)
class PeerStruck:
    """`peer` gets a strike for what it did in that round."""

    at: float
    peer: PeerId
    round_number: int
    reason: str


@dataclass(frozen=True)
class PeerQuarantined:
    """`peer` has `strikes` recent strikes: it counts as gone, and may not join again."""

    at: float
    peer: PeerId
    strikes: int


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
    round_number: int
    part: str
    peer: PeerId
    digest: str


@dataclass(frozen=True)
class AnchorDiverged:
    """The anchor of `peer` after that round differs from that of the others, which is `expected`."""

    at: float
    stage: int
    round_number: int
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
    | PeerMeasured
    | PeerDraining
    | PeerLost
    | PeerRetreated
    | AssignmentReserved
    | InviteCreated
    | InviteUsed
    | InviteRevoked
    | PeerBanned
    | PeerUnbanned
    | PlanAdopted
    | PayloadOffered
    | PayloadWithheld
    | GroupClosed
    | HoldingsReported
    | PayloadRejected
    | PeerStruck
    | PeerQuarantined
    | RoundCommitted
    | RoundAborted
    | DigestAttested
    | AnchorDiverged
    | RunFinished
)
