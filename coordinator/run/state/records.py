"""The frozen records of which the state consists: peers, invites, and what is open in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.base.persistent_map import PersistentMap
from coordinator.base.phrases import stages_of
from protocol.roles import POLICIES, RolePolicy
from protocol.status import Wait
from protocol.types import (
    Capacity,
    ExchangeGroup,
    Lifecycle,
    Member,
    Part,
    PayloadDescriptor,
    PeerId,
    Reachability,
    Replica,
    ResultClaim,
    Role,
    Verdict,
)


@dataclass(frozen=True)
class Peer:
    """A peer that has joined. `arrival` counts joins from 1 on and orders the peers.

    `lifecycle` is TRAINING while the newest plan, or the current one, assigns the peer and it is not absent.
    `finished` marks a peer that is GONE because its work was done. `endpoint` is where others open links to
    it, or ""; it changed in round `moved_in`. `claimed` is what it said, `problem` why that is no endpoint.
    `role_reason` says why the coordinator has chosen the role; "" for a role that the peer has chosen, which
    binds. `waits_since` is the round in which it joined, got another role or lost its assignment, and
    `role_changes` counts its roles after the first, since the start of the run.
    """

    peer: PeerId
    role: Role
    capacity: Capacity
    endpoint: str
    arrival: int
    lifecycle: Lifecycle
    finished: bool = False
    joined_at: float = 0.0
    reachability: Reachability = Reachability.OPEN
    claimed: str = ""
    problem: str = ""
    moved_in: int = 0
    role_reason: str = ""
    waits_since: int = 0
    role_changes: int = 0

    @property
    def is_flexible(self) -> bool:
        """Whether the coordinator chooses the role."""
        return bool(self.role_reason)

    @property
    def policy(self) -> RolePolicy:
        return POLICIES[self.role]

    @property
    def is_live(self) -> bool:
        return self.lifecycle is not Lifecycle.GONE

    @property
    def is_lost(self) -> bool:
        return not self.is_live and not self.finished

    @property
    def is_staying(self) -> bool:
        """Whether it may be in a later plan: it trains, is live and does not drain."""
        return self.policy.trains and self.is_live and self.lifecycle is not Lifecycle.DRAINING


@dataclass(frozen=True)
class LastSeen:
    """When a peer gave its last sign of life, and what its last heartbeat said.

    `has_sent_heartbeat` is false from the join until the first heartbeat. `ahead`: by (stage, round, part),
    the digests of its newest anchors after rounds that are not decided here.
    """

    at: float
    round_number: int = 0
    inner_step: int = 0
    has_sent_heartbeat: bool = False
    waits: tuple[Wait, ...] = ()
    kept: tuple[int, ...] = ()
    ahead: Mapping[tuple[int, int, Part], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Assignment:
    """The replica of a peer in a plan, and its position there."""

    replica: Replica
    position: int

    @property
    def member(self) -> Member:
        return self.replica.members[self.position]

    def __str__(self) -> str:
        return f"{self.replica.name}, {stages_of(self.member)}"


def peers_of(replica: Replica) -> list[PeerId]:
    return [member.peer for member in replica.members]


@dataclass(frozen=True)
class Contest:
    """The payloads of one (stage, round) that too few peers report as held.

    Attributes:
        at, seconds: when the arbiter was asked for them, and how long the decision waits for it.
        owners, left_out: of the payloads that it is asked for, and of others that cannot count.
        verdicts: of the arbiter so far, by owner.
    """

    at: float
    seconds: float
    owners: tuple[PeerId, ...]
    left_out: tuple[PeerId, ...]
    verdicts: Mapping[PeerId, Verdict] = field(default_factory=dict)

    @property
    def open_owners(self) -> tuple[PeerId, ...]:
        """The owners whose payloads have no verdict yet."""
        return tuple(owner for owner in self.owners if owner not in self.verdicts)


@dataclass(frozen=True)
class Break:
    """When a member of a broken replica retreated in the open round, and the inner steps that it had done.

    `steps` is None where it cannot go on with other neighbours. `epoch` is that of the newest plan then.
    """

    at: float
    steps: int | None
    epoch: int


@dataclass(frozen=True)
class FailedLink:
    """A link of `replica` that could not be opened at `address` under plan `epoch`, in that round.

    `is_moved`: an end has other addresses since. That plan has the former ones, and the next may try again.
    `since`: as in events.LinkFailed.
    """

    epoch: int
    replica: int
    round_number: int
    address: str
    reason: str
    is_moved: bool = False
    since: int | None = None

    @property
    def is_of_frames(self) -> bool:
        """Whether the link was open, and what passed it was of no use: neither end can make up for that."""
        return not self.address


@dataclass(frozen=True)
class Alarm:
    """The newest alarm (events.AlarmRaised). `is_over`: the operator has resumed the run since."""

    round_number: int
    last_healthy: int
    reason: str
    is_over: bool = False


RECENT_ROUNDS = 16
"""Rounds of which is kept whether a member has answered, and whether a replica has delivered."""
MOST_SILENT = 4
"""A member answers in at least twelve of its last sixteen rounds. Each silence makes a round up to twice as
long, so a member of four or more equal replicas that answers in fewer costs more than it contributes."""
_SILENT_FAILURES = 5
"""A member that answers too seldom counts as so many failures, and rests for sixteen rounds."""
_ALL_RECENT = (1 << RECENT_ROUNDS) - 1


@dataclass(frozen=True)
class Silence:
    """A peer that takes part has neither offered nor withheld a payload in `rounds` rounds in a row.

    `last` is the last of them; `since` is when the first of them began. `recent` has a bit for each of the
    rounds in which the peer took part, up to round `counted` in bit 0: whether it was silent although its
    chain had trained before, so that its links are open.
    """

    rounds: int
    last: int
    since: float
    recent: int = 0
    counted: int = 0

    def after(self, round_number: int, is_silent: bool, has_trained: bool) -> Silence:
        """With a decision about a stage that the peer hosts."""
        recent = (self.recent << (self.counted < round_number) | (is_silent and has_trained)) & _ALL_RECENT
        is_new, last = is_silent and self.last < round_number, round_number if is_silent else self.last
        return Silence(self.rounds + is_new, last, self.since, recent, round_number)

    @property
    def is_frequent(self) -> bool:
        """Whether the peer has answered too seldom."""
        return self.recent.bit_count() > MOST_SILENT

    def failures(self, times: int) -> int:
        """The failures that a peer counts after one more: many if it answers seldom."""
        return max(times, _SILENT_FAILURES - 1) + 1 if self.is_frequent else times + 1


@dataclass(frozen=True)
class Barren:
    """A replica has withheld its payload of a stage in `rounds` rounds in a row; `since` is the round before.

    `recent` has a bit for each of its rounds with an answer, the newest in bit 0: whether it has withheld.
    """

    since: int
    rounds: int = 0
    recent: int = 0

    def after(self, round_number: int, is_withheld: bool) -> Barren:
        recent = (self.recent << 1 | is_withheld) & _ALL_RECENT
        return Barren(self.since, self.rounds + 1, recent) if is_withheld else Barren(round_number, 0, recent)


@dataclass(frozen=True)
class Round:
    """The state of one (stage, round), without its decision.

    Attributes:
        withheld: hosts that will not offer a payload.
        members: the owners of the payloads of the group.
        closed_at: when the group was closed.
        reports: by reporter, the owners of the payloads that it holds.
        report_counts: by reporter, how often its report has changed.
        results: by reporter, the result that it holds; of an exchange whose members agree on one.
        gathered_in: seconds from `closed_at` to the slowest report; 0 before any report, and if the
            coordinator was restarted in between.
        rejections: by owner of a payload, the peers that reject it and their reasons.
        contest: None unless the arbiter was asked for payloads.
    """

    offers: PersistentMap[PeerId, PayloadDescriptor] = field(default_factory=PersistentMap)
    withheld: frozenset[PeerId] = frozenset()
    group: ExchangeGroup | None = None
    members: frozenset[PeerId] = frozenset()
    closed_at: float = 0.0
    reports: PersistentMap[PeerId, frozenset[PeerId]] = field(default_factory=PersistentMap)
    report_counts: PersistentMap[PeerId, int] = field(default_factory=PersistentMap)
    results: PersistentMap[PeerId, ResultClaim] = field(default_factory=PersistentMap)
    gathered_in: float = 0.0
    rejections: Mapping[PeerId, Mapping[PeerId, str]] = field(default_factory=dict)
    contest: Contest | None = None


@dataclass(frozen=True)
class OpenPlace:
    """The place of a peer without an invite, which it has had `since`, and asked for last at `asked`.

    `source`: from where it came. `admitted`: it may join; else it waits for its turn.
    """

    since: float
    asked: float
    source: str
    admitted: bool


@dataclass(frozen=True)
class Invitation:
    """An invite. `role` None permits any role; `peers` have used it, each once."""

    invite: str
    secret_sha256: str
    uses: int
    expires_at: float
    role: Role | None
    peers: tuple[PeerId, ...] = ()
    revoked: bool = False
