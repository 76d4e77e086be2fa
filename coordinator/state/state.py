"""The coordinator's state as frozen records, and the questions that the rules ask it.

Pure: nothing here reads a clock or does IO. The state is exactly what the stored events replay to
(coordinator.state.apply), except for `State.last_seen`, which heartbeats move without leaving a trace in the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.roles import RolePolicy, policy_of
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import (
    Capacity,
    Decision,
    Estimates,
    ExchangeGroup,
    Lifecycle,
    Member,
    PayloadDescriptor,
    PeerId,
    Plan,
    Replica,
    ReservedAssignment,
    Role,
    StageRange,
)

KEPT_ROUNDS = 8
"""Offers, reports and digests of so many rounds are kept for late callers; plans and decisions all are."""
KEPT_CHECKPOINTS = 3
"""Digests of so many checkpoint rounds are kept beside those."""


@dataclass(frozen=True)
class Peer:
    """A peer that has joined. `arrival` counts joins from 1 on and orders the peers.

    `lifecycle` is TRAINING while the newest plan, or that of the current round, seats the peer and it has
    kept its seat. `finished` marks a peer that is GONE because its work was done: its replica has not lost a
    member.
    """

    peer: PeerId
    role: Role
    capacity: Capacity
    endpoint: str
    arrival: int
    lifecycle: Lifecycle
    finished: bool = False
    joined_at: float = 0.0

    @property
    def policy(self) -> RolePolicy:
        return policy_of(self.role)

    @property
    def is_live(self) -> bool:
        return self.lifecycle is not Lifecycle.GONE

    @property
    def is_lost(self) -> bool:
        return not self.is_live and not self.finished

    @property
    def is_staying(self) -> bool:
        """Whether it may be in a later plan: it is live and does not drain."""
        return self.is_live and self.lifecycle is not Lifecycle.DRAINING


@dataclass(frozen=True)
class LastSeen:
    """When a peer was last heard of, and the progress that its last heartbeat named.

    `has_sent_heartbeat` is false from the join until the first heartbeat.
    """

    at: float
    round_number: int = 0
    inner_step: int = 0
    has_sent_heartbeat: bool = False


@dataclass(frozen=True)
class Assignment:
    """The place of a peer in a plan."""

    replica: Replica
    position: int

    @property
    def member(self) -> Member:
        return self.replica.members[self.position]

    def __str__(self) -> str:
        return f"{self.replica.name}, {stages_of(self.member)}"


def stages_of(holder: Member | ReservedAssignment) -> str:
    """Such as "stage 1" or "stages 0-3"."""
    return f"{'stage' if len(holder.stages) == 1 else 'stages'} {holder.stages}"


@dataclass(frozen=True)
class Invitation:
    """An invite as the coordinator knows it. `role` None is any role; `peers` have used it, each once."""

    invite: str
    secret_sha256: str
    uses: int
    expires_at: float
    role: Role | None
    peers: tuple[PeerId, ...] = ()
    revoked: bool = False


@dataclass(frozen=True)
class Round:
    """What is known of one (stage, round) beside its decision.

    `withheld` are the hosts that will not offer; `reports` maps each reporter to the owners of the payloads
    that it holds; `rejections` maps the owner of a payload to those who refuse it and their reasons.
    `closed_at` is when the group closed, `gathered_in` how many seconds later the slowest report came, 0
    before any and where a restart of the coordinator lay between.
    """

    offers: Mapping[PeerId, PayloadDescriptor] = field(default_factory=dict)
    withheld: frozenset[PeerId] = frozenset()
    group: ExchangeGroup | None = None
    closed_at: float = 0.0
    reports: Mapping[PeerId, frozenset[PeerId]] = field(default_factory=dict)
    gathered_in: float = 0.0
    rejections: Mapping[PeerId, Mapping[PeerId, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """All that the coordinator knows.

    Rounds count from 1. `current_round` is the first that is not decided at every stage: 0 before the run
    starts, ``spec.rounds + 1`` after its last decision. It became so, or its plan was replaced, at
    `began_at`; `opened_at` is when the first payload was offered or the first stage decided in it.
    `latest_at` is the time of the newest stored event.

    `estimates` are what each peer has measured since it joined; `tellings` is how often it has told them, and
    when last. `reservations` are kept for peers from plan to plan; `assigned_replicas` are the replicas (by
    index) that were in a plan at least once. `absent` names, for each epoch that
    still matters, the members that were lost, retreated, or were found diverged since its plan was made:
    their replicas are broken under that plan even when they are back. `synced` is the highest round after
    which each peer attested each stage rightly, since it joined. `retreats` counts by replica (index) the
    rounds since its last payload in a commit in which it gave up, and names the last of them. `lapses` does
    so by peer with the rounds in which it was lost, left without draining, or gave up; each round in which a
    payload of it is committed takes one off.

    `layouts` are the stages of each position of a replica (index); they never change. `moved` is the round in
    which a peer last got a place with other stages. `tuned_at` is the first round of the newest plan that
    only made the run faster: it exchanged peers that could have stayed, or shared out microbatches anew.

    `strikes` are the rounds for which each peer got one. `digests` are by (stage, round, part) and peer;
    `diverged` are the (peer, stage, round, part) whose anchor was found to differ from that of the others,
    until the peer attests the right one. `enrolled` maps each peer that may have certificates to the last
    invite that it came with, `banned` each peer that the operator keeps out to the reason.
    """

    stages: int
    checkpoint_every: int = 10
    phase: RunPhase = RunPhase.GATHERING
    latest_at: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    arrivals: int = 0
    peers: Mapping[PeerId, Peer] = field(default_factory=dict)
    last_seen: Mapping[PeerId, LastSeen] = field(default_factory=dict, compare=False)
    estimates: Mapping[PeerId, Estimates] = field(default_factory=dict)
    tellings: Mapping[PeerId, tuple[int, float]] = field(default_factory=dict)
    reservations: Mapping[PeerId, ReservedAssignment] = field(default_factory=dict)
    plans: tuple[Plan, ...] = ()
    assignments: Mapping[int, Mapping[PeerId, Assignment]] = field(default_factory=dict)
    assigned_replicas: frozenset[int] = frozenset()
    absent: Mapping[int, frozenset[PeerId]] = field(default_factory=dict)
    synced: Mapping[PeerId, Mapping[int, int]] = field(default_factory=dict)
    retreats: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    lapses: Mapping[PeerId, tuple[int, int]] = field(default_factory=dict)
    layouts: Mapping[int, tuple[StageRange, ...]] = field(default_factory=dict)
    moved: Mapping[PeerId, int] = field(default_factory=dict)
    tuned_at: int = 0
    current_round: int = 0
    began_at: float = 0.0
    opened_at: float | None = None
    rounds: Mapping[tuple[int, int], Round] = field(default_factory=dict)
    decisions: Mapping[tuple[int, int], Decision] = field(default_factory=dict)
    strikes: Mapping[PeerId, tuple[int, ...]] = field(default_factory=dict)
    quarantined: frozenset[PeerId] = frozenset()
    digests: Mapping[tuple[int, int, str], Mapping[PeerId, str]] = field(default_factory=dict)
    committed: int = 0
    diverged: frozenset[tuple[PeerId, int, int, str]] = frozenset()
    invitations: Mapping[str, Invitation] = field(default_factory=dict)
    enrolled: Mapping[PeerId, str] = field(default_factory=dict)
    banned: Mapping[PeerId, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RunSpec) -> State:
        """The state of a run of which nothing has happened yet."""
        return cls(stages=spec.swarm.stages, checkpoint_every=spec.recovery.checkpoint_every)

    @property
    def aborted(self) -> int:
        return len(self.decisions) - self.committed

    @property
    def rounds_decided(self) -> int:
        """Rounds that are decided at every stage."""
        return max(0, self.current_round - 1)

    @property
    def kept_out(self) -> frozenset[PeerId]:
        """The peers that are banned or in quarantine: no peer deals with them."""
        return self.quarantined | self.banned.keys()

    @property
    def staying(self) -> list[Peer]:
        """The peers that may be in a later plan."""
        return [peer for peer in self.peers.values() if peer.is_staying]

    def layout(self, replica: int) -> tuple[StageRange, ...]:
        """The stages of each position of `replica`; of a new pipeline, as most of the newest plan have them.

        One stage for each position where that plan has no pipeline.
        """
        if replica in self.layouts:
            return self.layouts[replica]
        newest = self.plans[-1].replicas if self.plans else ()
        used = Counter(tuple(m.stages for m in each.members) for each in newest if len(each.members) > 1)
        if not used:
            return tuple(StageRange(stage, stage + 1) for stage in range(self.stages))
        return min(used, key=lambda layout: (-used[layout], -len(layout), layout))

    def round_of(self, stage: int, round_number: int) -> Round:
        return self.rounds.get((stage, round_number), _NOTHING_YET)

    def plan_for(self, round_number: int) -> Plan:
        """The plan under which `round_number` runs; the first plan for rounds before it."""
        later_first = reversed(self.plans)
        return next((plan for plan in later_first if plan.from_round <= round_number), self.plans[0])

    def assignment(self, peer: PeerId, round_number: int) -> Assignment | None:
        """The seat of `peer` in `round_number`, if it has one. Seats of long ago are forgotten."""
        return self.assignments.get(self.plan_for(round_number).epoch, {}).get(peer) if self.plans else None

    def takes_part(self, peer: PeerId, round_number: int) -> bool:
        """Whether `peer` has a seat in `round_number` and has kept it ever since the plan was made."""
        epoch = self.plan_for(round_number).epoch if self.plans else 0
        return peer in self.assignments.get(epoch, {}) and peer not in self.absent.get(epoch, ())

    def complete_replicas(self, round_number: int) -> list[Replica]:
        """The replicas of `round_number` of which every member takes part."""
        plan = self.plan_for(round_number)
        absent = self.absent.get(plan.epoch)
        if not absent:
            return list(plan.replicas)
        return [
            replica
            for replica in plan.replicas
            if not any(member.peer in absent for member in replica.members)
        ]

    def keeps_digests(self, round_number: int) -> bool:
        """Whether what is attested of the anchors after `round_number` is still kept."""
        if round_number >= self.current_round - KEPT_ROUNDS:
            return True
        oldest = self.rounds_decided - KEPT_CHECKPOINTS * self.checkpoint_every
        return round_number % self.checkpoint_every == 0 and round_number > oldest


_NOTHING_YET = Round()
