"""Commands of peers, the operator and the clock to the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from protocol.status import ModelEvaluation, Wait
from protocol.trust.owner_binding import OwnerBinding
from protocol.types import (
    Capacity,
    Estimates,
    PausedBy,
    PayloadDescriptor,
    PeerId,
    Reachability,
    Rejection,
    ResultClaim,
    Role,
    Verdict,
)


@dataclass(frozen=True)
class Start:
    """The coordinator begins to listen, for the first time or again; `term`: a later one, or 0."""

    term: int = 0


@dataclass(frozen=True)
class Join:
    """`endpoint` answered as this peer, or is "". For the three fields after it see events.PeerJoined.

    `role` None: the coordinator chooses. `name` is public, or "".
    """

    protocol_version: int
    spec_hash: str
    peer: PeerId
    role: Role | None
    capacity: Capacity
    endpoint: str
    reachability: Reachability | None = None
    claimed: str = ""
    problem: str = ""
    name: str = ""


@dataclass(frozen=True)
class BindOwner:
    """Owner and peer have signed that the peer is the owner's."""

    binding: OwnerBinding


@dataclass(frozen=True)
class UpdateAddresses:
    """Others reach `peer` at another address, or not any more; see events.PeerJoined."""

    peer: PeerId
    endpoint: str
    reachability: Reachability
    claimed: str
    problem: str


@dataclass(frozen=True)
class ReportLink:
    """`peer` cannot open the link to `neighbour` at `address` under plan `epoch`, and goes on trying."""

    peer: PeerId
    epoch: int
    neighbour: PeerId
    address: str
    reason: str


@dataclass(frozen=True)
class CreateInvite:
    """`secret_sha256` is in hex, `valid_seconds` count from now, and `role` None permits any role."""

    invite: str
    secret_sha256: str
    uses: int
    valid_seconds: float
    role: Role | None


@dataclass(frozen=True)
class RevokeInvite:
    invite: str


@dataclass(frozen=True)
class Enroll:
    """A peer that has proved its identity asks for a certificate. An enrolled peer needs no `invite`: ""."""

    peer: PeerId
    invite: str
    secret_sha256: str


@dataclass(frozen=True)
class AskPlace:
    """`peer`, which comes from `source` without an invite, asks to take part.

    `members`: such peers that the run takes at once; 0 if it is not open. `joins`: new ones that it takes
    from one source in an hour.
    """

    peer: PeerId
    source: str
    members: int
    joins: int


@dataclass(frozen=True)
class Ban:
    """`revoke_invites`: revoke the invites of the peer that still let others in."""

    peer: PeerId
    reason: str
    revoke_invites: bool = False


@dataclass(frozen=True)
class Unban:
    peer: PeerId


@dataclass(frozen=True)
class PauseRun:
    """The round that is open ends, and no other begins. `reason`: a sentence for people, or ""."""

    by: PausedBy
    reason: str


@dataclass(frozen=True)
class ResumeRun:
    """A paused run goes on."""


@dataclass(frozen=True)
class ChangeRun:
    """Settings have other values from a round on (protocol.spec.change).

    `from_round` 0: from the first round that no member may have begun.
    """

    settings: tuple[str, ...]
    from_round: int
    reason: str


@dataclass(frozen=True)
class Unname:
    """Take the public name of `peer` and refuse it any; `allow`: it may have one again at its next join."""

    peer: PeerId
    allow: bool = False


@dataclass(frozen=True)
class RollBack:
    """The next round restores the anchors after `restore_round`, and the run is paused."""

    restore_round: int
    reason: str


@dataclass(frozen=True)
class Leave:
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Drain:
    """`peer` wants to leave at the end of its round."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Retreat:
    """`peer` cannot train under the plan of `epoch`, for example after two members lost their link.

    In `round_number` it has done `steps` inner steps, and can go on with other neighbours; None: it cannot.
    """

    peer: PeerId
    epoch: int
    reason: str
    round_number: int = 0
    steps: int | None = None


@dataclass(frozen=True)
class Heartbeat:
    """`estimates` is None if they have not changed. `waits`: what the peer waits for.

    `kept`: the rounds whose anchors the peer has on its disk, for all its stages.
    """

    peer: PeerId
    round_number: int
    inner_step: int
    estimates: Estimates | None = None
    waits: tuple[Wait, ...] = ()
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Offer:
    peer: PeerId
    descriptor: PayloadDescriptor


@dataclass(frozen=True)
class Await:
    """A peer waits for a decision without contributing a payload.

    `epoch`: of the plan under which the peer hosts the stage but offers no payload; 0 if it only asks.
    """

    peer: PeerId
    stage: int
    round_number: int
    epoch: int = 0


@dataclass(frozen=True)
class Report:
    """The payloads of a round that a peer holds, and those that it rejects."""

    peer: PeerId
    stage: int
    round_number: int
    held: tuple[PayloadDescriptor, ...]
    rejected: tuple[Rejection, ...] = ()
    result: ResultClaim | None = None


@dataclass(frozen=True)
class AppointArbiter:
    """`peer`, the coordinator's own, fetches and serves contested payloads; None: no peer does.

    It comes from the coordinator itself, like :class:`Arbitrate`: no call of the API makes it.
    """

    peer: PeerId | None


@dataclass(frozen=True)
class TellOwnRelay:
    """The coordinator's own relay at `endpoint` can send `uplink` bytes per second; 0 if that is not known.

    No call of the API makes it.
    """

    endpoint: str
    uplink: float


@dataclass(frozen=True)
class Arbitrate:
    """What the arbiter found out about the contested payload of `owner`."""

    stage: int
    round_number: int
    owner: PeerId
    verdict: Verdict


@dataclass(frozen=True)
class Weigh:
    """Whether the payloads of `peer` count, by its `score` up to that round. No call of the API makes it."""

    peer: PeerId
    round_number: int
    counts: bool
    score: float


@dataclass(frozen=True)
class Attest:
    peer: PeerId
    stage: int
    round_number: int
    part: str
    digest: str


@dataclass(frozen=True)
class RaiseAlarm:
    """The training looks unhealthy (coordinator.ops.health). Fields as in events.AlarmRaised.

    No call of the API makes it.
    """

    round_number: int
    last_healthy: int
    reason: str
    pauses: bool


@dataclass(frozen=True)
class Tick:
    """Time has passed: silent peers are lost, groups are closed, rounds are decided.

    `heard`: when peers have begun their newest call, which may still wait to be decided. `issued`: when this
    command was issued. It may have waited since, and so may the calls of peers.
    """

    heard: Mapping[PeerId, float] = field(default_factory=dict)
    issued: float = inf


Command: TypeAlias = (
    Start | TellOwnRelay | RaiseAlarm | Tick | AppointArbiter | Arbitrate
    | CreateInvite | RevokeInvite | Ban | Unban | PauseRun | ResumeRun | ChangeRun | RollBack | Unname
    | Enroll | AskPlace | Join | UpdateAddresses | Heartbeat | ReportLink | Retreat | Drain | Leave
    | BindOwner | Offer | Await | Report | Attest | Weigh | ModelEvaluation
)  # fmt: skip
