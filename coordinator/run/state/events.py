"""Events: what has happened to a run, as it is stored and replayed.

`at` is the time in seconds on the clock of the command loop. Field names and their order are the stored form.

One file because each kind is a few fields, and all together are one union.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field

from protocol.status import ModelEvaluation, Wait
from protocol.trust.owner_binding import OwnerBinding
from protocol.types import (
    Capacity,
    Decision,
    Estimates,
    Part,
    PausedBy,
    PayloadDescriptor,
    PeerId,
    Plan,
    Reachability,
    ReservedAssignment,
    ResultClaim,
    Role,
    RunChange,
    Verdict,
)


@dataclass(frozen=True)
class _Event:
    at: float


@dataclass(frozen=True)
class StageEvent(_Event):
    """What events about one (stage, round) have in common."""

    stage: int
    round_number: int


@dataclass(frozen=True)
class CoordinatorStarted(_Event):
    """Deadlines and silence count from here: no peer could report before. `term` grows at each take-over."""

    term: Annotated[int, Field(exclude_if=lambda term: not term)] = 0


@dataclass(frozen=True)
class OwnRelayTold(_Event):
    """The coordinator's relay at `endpoint` can send `uplink` bytes per second; 0 if that is not known."""

    endpoint: str
    uplink: float


@dataclass(frozen=True)
class PeerJoined(_Event):
    """`endpoint` answered as this peer, or is "". `claimed` is what the peer called its endpoint.

    `reachability` None, in logs of earlier versions, is as claimed. `problem` is a sentence, or "".
    `role_reason`, a sentence, is set if the coordinator has chosen the role and may change it.
    """

    peer: PeerId
    role: Role
    capacity: Capacity
    endpoint: str
    reachability: Reachability | None = None
    claimed: str = ""
    problem: str = ""
    role_reason: str = ""


@dataclass(frozen=True)
class RoleChanged(_Event):
    """`peer`, which leaves its role to the coordinator, has another one from now on. `reason`: a sentence."""

    peer: PeerId
    role: Role
    reason: str


@dataclass(frozen=True)
class AddressesChanged(_Event):
    """Others reach `peer` at another address from now on, or not any more. Fields as in PeerJoined."""

    peer: PeerId
    endpoint: str
    reachability: Reachability
    claimed: str
    problem: str


@dataclass(frozen=True)
class PeerSeen(_Event):
    """A heartbeat; see records.LastSeen. The only event that is not stored."""

    peer: PeerId
    round_number: int
    inner_step: int
    waits: tuple[Wait, ...] = ()
    kept: tuple[int, ...] = ()
    ahead: Mapping[tuple[int, int, Part], str] = field(default_factory=dict)


@dataclass(frozen=True)
class PeerLeft(_Event):
    peer: PeerId
    reason: str
    finished: bool


@dataclass(frozen=True)
class PeerMeasured(_Event):
    """The estimates of `peer` have changed."""

    peer: PeerId
    estimates: Estimates


@dataclass(frozen=True)
class PeerDraining(_Event):
    """`peer` leaves at the end of its round: no later plan assigns it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PeerNamed(_Event):
    """`peer` has the public name `name` from now on, or none. `refused`: the operator allows it none."""

    peer: PeerId
    name: str
    refused: bool = False


@dataclass(frozen=True)
class OwnerBound(_Event):
    """The peer's credit, also what it has by now, is its owner's."""

    binding: OwnerBinding


@dataclass(frozen=True)
class PeerLost(_Event):
    peer: PeerId
    silent_seconds: float


@dataclass(frozen=True)
class PeerRetreated(_Event):
    """`peer` cannot train under plan `epoch`: it follows until a later plan assigns it.

    `steps`: those that it has done in the open round, if it can go on from there with other neighbours.
    """

    peer: PeerId
    epoch: int
    reason: str
    steps: Annotated[int | None, Field(exclude_if=lambda steps: steps is None)] = None


@dataclass(frozen=True)
class LinkFailed(_Event):
    """`peer` cannot open the link to `neighbour` at `address` under plan `epoch`, and goes on trying.

    `address` "": the link was open. The next plans keep the two apart, as `peer` refuses a frame of
    `neighbour`, or as their replica has delivered nothing after round `since`.
    """

    peer: PeerId
    epoch: int
    neighbour: PeerId
    address: str
    reason: str
    since: int | None = None


@dataclass(frozen=True)
class AssignmentReserved(_Event):
    """`reservation` replaces the former one of its peer, and that of another peer for the same slot."""

    reservation: ReservedAssignment


@dataclass(frozen=True)
class InviteCreated(_Event):
    """`secret_sha256` (hex) is all that is kept of the secret. `role` None permits any."""

    invite: str
    secret_sha256: str
    uses: int
    expires_at: float
    role: Role | None


@dataclass(frozen=True)
class InviteUsed(_Event):
    """`peer` is enrolled from now on: it may have certificates until it is banned."""

    invite: str
    peer: PeerId


@dataclass(frozen=True)
class PlaceAsked(_Event):
    """`peer`, which has no invite, keeps its place among such peers, or gets the last one.

    `source`: from where it came. `admitted`: it may join now; else it waits. `ended`: the peers whose places
    end, since they were away for too long.
    """

    peer: PeerId
    source: str
    admitted: bool
    ended: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class InviteRevoked(_Event):
    invite: str


@dataclass(frozen=True)
class PeerBanned(_Event):
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class PeerUnbanned(_Event):
    peer: PeerId


@dataclass(frozen=True)
class PlanAdopted(_Event):
    plan: Plan


@dataclass(frozen=True)
class PayloadOffered(_Event):
    descriptor: PayloadDescriptor


@dataclass(frozen=True)
class PayloadWithheld(StageEvent):
    """A host of the stage has ended its inner phase and offers no payload."""

    peer: PeerId


@dataclass(frozen=True)
class GroupClosed(StageEvent):
    """The group consists of all offers so far that start from this anchor, sorted by owner.

    Its members have `seconds` to gather the payloads.
    """

    group_id: str
    anchor_digest: str
    seconds: float


@dataclass(frozen=True)
class HoldingsReported(StageEvent):
    """`peer` holds the payloads of `owners`; or, if `of_group` is not 0, all payloads of the group but those
    of `lacking`. `of_group` is the number of payloads in the group.
    """

    peer: PeerId
    owners: tuple[PeerId, ...]
    of_group: int = 0
    lacking: tuple[PeerId, ...] = ()

    @property
    def count(self) -> int:
        """How many payloads it holds."""
        return self.of_group - len(self.lacking) if self.of_group else len(self.owners)


@dataclass(frozen=True)
class ResultReported(StageEvent):
    """`peer` holds this result of the reduction; it tells that once."""

    peer: PeerId
    claim: ResultClaim


@dataclass(frozen=True)
class PayloadRejected(StageEvent):
    """`peer` rejects the payload of `owner`."""

    peer: PeerId
    owner: PeerId
    reason: str


@dataclass(frozen=True)
class ArbiterAppointed(_Event):
    """`peer` fetches and serves contested payloads from now on; None: no peer does."""

    peer: PeerId | None


@dataclass(frozen=True)
class PayloadsContested(StageEvent):
    """The arbiter has `seconds` to fetch the payloads of `owners`. Those of `left_out` cannot count."""

    owners: tuple[PeerId, ...]
    left_out: tuple[PeerId, ...]
    seconds: float


@dataclass(frozen=True)
class PayloadArbitrated(StageEvent):
    owner: PeerId
    verdict: Verdict


@dataclass(frozen=True)
class PeerStruck(_Event):
    """`peer` gets a strike for a bad offer, report or payload of that round."""

    peer: PeerId
    round_number: int
    reason: str


@dataclass(frozen=True)
class PeerWeighed(_Event):
    """The payloads of `peer` count from the next decision on, or do not, by its `score` up to that round."""

    peer: PeerId
    round_number: int
    counts: bool
    score: float


@dataclass(frozen=True)
class PeerQuarantined(_Event):
    """`peer` has `strikes` recent strikes: it counts as gone, and may not join again."""

    peer: PeerId
    strikes: int


@dataclass(frozen=True)
class RoundDecided(_Event):
    decision: Decision


@dataclass(frozen=True)
class DigestAttested(StageEvent):
    part: str
    peer: PeerId
    digest: str


@dataclass(frozen=True)
class AnchorDiverged(StageEvent):
    """The anchor of `peer` after that round differs from that of the others, which is `expected`."""

    part: str
    peer: PeerId
    digest: str
    expected: str


@dataclass(frozen=True)
class AlarmRaised(_Event):
    """Most of the run looked unhealthy in that round, and was healthy in `last_healthy`; 0: not known.

    `reason` is what was seen, in sentences with figures.
    """

    round_number: int
    last_healthy: int
    reason: str


@dataclass(frozen=True)
class RunPaused(_Event):
    """No inner phase of `from_round` or a later one begins before RunResumed. `reason`: a sentence, or ""."""

    from_round: int
    by: PausedBy
    reason: str


@dataclass(frozen=True)
class RunResumed(_Event):
    """The run goes on after RunPaused."""


@dataclass(frozen=True)
class RunChanged(_Event):
    """The operator, or a rollback, changes settings. The first plan of that round or a later one has it."""

    change: RunChange


@dataclass(frozen=True)
class ModelEvaluated(_Event):
    """A member, or the operator, has told what the model can do."""

    evaluation: ModelEvaluation


@dataclass(frozen=True)
class AnchorDigest:
    """The digest of one part of a stage."""

    stage: int
    part: str
    digest: str


@dataclass(frozen=True)
class RunRolledBack(_Event):
    """The decisions of `round_number` restore the anchors after `restore_round`, whose digests are these.

    RoundDecided with RolledBack follows for each stage, in the same transaction.
    """

    round_number: int
    restore_round: int
    reason: str
    digests: tuple[AnchorDigest, ...]


@dataclass(frozen=True)
class RunFinished(_Event):
    """All rounds are decided, and the last anchors are confirmed."""


_EndEvent: TypeAlias = RunPaused | RunResumed | RunRolledBack | RunFinished
RunEvent: TypeAlias = (
    CoordinatorStarted | OwnRelayTold | PlanAdopted | AlarmRaised | RunChanged | ModelEvaluated | _EndEvent
)
NameEvent: TypeAlias = PeerNamed | OwnerBound
PresenceEvent: TypeAlias = (
    PeerJoined | NameEvent | RoleChanged | PeerSeen | PeerMeasured | PeerDraining | PeerLeft | PeerLost
)
ConnectionEvent: TypeAlias = AddressesChanged | LinkFailed
ExclusionEvent: TypeAlias = (
    PeerRetreated | PeerStruck | PeerWeighed | PeerQuarantined | PeerBanned | PeerUnbanned
)
PeerEvent: TypeAlias = PresenceEvent | ConnectionEvent | ExclusionEvent
InviteEvent: TypeAlias = InviteCreated | InviteUsed | InviteRevoked | PlaceAsked
ReportEvent: TypeAlias = HoldingsReported | ResultReported | PayloadRejected
ExchangeEvent: TypeAlias = PayloadOffered | PayloadWithheld | GroupClosed | ReportEvent
ArbitrationEvent: TypeAlias = ArbiterAppointed | PayloadsContested | PayloadArbitrated
AnchorEvent: TypeAlias = DigestAttested | AnchorDiverged
RoundEvent: TypeAlias = ExchangeEvent | ArbitrationEvent | RoundDecided | AnchorEvent
Event: TypeAlias = RunEvent | PeerEvent | InviteEvent | AssignmentReserved | RoundEvent
