"""The coordinator's state as frozen records, and :func:`apply`, which moves it from event to event.

Pure: nothing here reads a clock or does IO. The state is exactly what the stored events replay to, except for
`State.pulses`, which heartbeats move without leaving a trace in the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import assert_never

from coordinator.events import (
    AnchorDiverged,
    CoordinatorStarted,
    DigestAttested,
    Event,
    GroupClosed,
    HoldingsReported,
    InviteCreated,
    InviteRevoked,
    InviteUsed,
    PayloadOffered,
    PayloadRejected,
    PayloadWithheld,
    PeerBanned,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PeerQuarantined,
    PeerSeen,
    PeerStruck,
    PeerUnbanned,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
    RunFinished,
)
from protocol.types import (
    Capacity,
    Decision,
    Group,
    Lifecycle,
    Member,
    PayloadDescriptor,
    PeerId,
    Plan,
    Replica,
    Role,
)

KEPT_ROUNDS = 8
"""Offers, reports and digests of so many rounds are kept for late callers; plans and decisions all are."""


class Phase(StrEnum):
    GATHERING = "gathering"
    TRAINING = "training"
    FINISHED = "finished"


@dataclass(frozen=True)
class Peer:
    """A peer that has joined. `arrival` counts joins from 1 on and orders the peers.

    `finished` marks a peer that is GONE because its work was done: its replica has not lost a member.
    """

    peer: PeerId
    role: Role
    capacity: Capacity
    endpoint: str
    arrival: int
    lifecycle: Lifecycle
    finished: bool = False

    @property
    def is_live(self) -> bool:
        return self.lifecycle is not Lifecycle.GONE

    @property
    def is_lost(self) -> bool:
        return not self.is_live and not self.finished


@dataclass(frozen=True)
class Pulse:
    """When a peer was last heard of, and how far it said it was; `beating` after its first heartbeat."""

    seen: float
    round: int = 0
    inner_step: int = 0
    beating: bool = False


@dataclass(frozen=True)
class Seat:
    """The place of a peer in a plan."""

    replica: Replica
    position: int

    @property
    def member(self) -> Member:
        return self.replica.members[self.position]

    def __str__(self) -> str:
        stages = self.member.stages
        return f"{self.replica.name}, {'stage' if len(stages) == 1 else 'stages'} {stages}"


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
    that it holds; `rejections` maps the owner of a payload to those who refuse it and their reasons. Times
    are seconds; `opened_at` is that of the first offer.
    """

    offers: Mapping[PeerId, PayloadDescriptor] = field(default_factory=dict)
    withheld: frozenset[PeerId] = frozenset()
    opened_at: float = 0.0
    group: Group | None = None
    closed_at: float = 0.0
    reports: Mapping[PeerId, frozenset[PeerId]] = field(default_factory=dict)
    rejections: Mapping[PeerId, Mapping[PeerId, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """All that the coordinator knows.

    Rounds count from 1. `current_round` is the first that is not decided at every stage: 0 before the run
    starts, ``spec.rounds + 1`` after its last decision. `active_at` is when anything last happened in it, or
    None. `strikes` are the rounds for which each peer got one. `digests` are by (stage, round, part) and
    peer; `diverged` are the (peer, stage, round, part) whose anchor was found to differ from that of the
    others. `enrolled` maps each peer that may have certificates to the last invite that it came with,
    `banned` each peer that the operator keeps out to the reason.
    """

    stages: int
    phase: Phase = Phase.GATHERING
    started_at: float = 0.0
    finished_at: float = 0.0
    arrivals: int = 0
    losses: int = 0
    peers: Mapping[PeerId, Peer] = field(default_factory=dict)
    pulses: Mapping[PeerId, Pulse] = field(default_factory=dict, compare=False)
    plans: tuple[Plan, ...] = ()
    seats: Mapping[int, Mapping[PeerId, Seat]] = field(default_factory=dict)
    current_round: int = 0
    active_at: float | None = None
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

    def round(self, stage: int, number: int) -> Round:
        return self.rounds.get((stage, number), _NOTHING_YET)

    def plan_for(self, number: int) -> Plan:
        """The plan under which round `number` runs; the first plan for rounds before it."""
        later_first = reversed(self.plans)
        return next((plan for plan in later_first if plan.from_round <= number), self.plans[0])

    def seat(self, peer: PeerId, number: int) -> Seat | None:
        """The place of `peer` in round `number`, if it has one."""
        return self.seats[self.plan_for(number).epoch].get(peer) if self.plans else None

    def is_broken(self, replica: Replica) -> bool:
        """Whether a member of `replica` is gone before its work was done."""
        return any(self.peers[member.peer].is_lost for member in replica.members)

    def complete_replicas(self, number: int) -> list[Replica]:
        return [replica for replica in self.plan_for(number).replicas if not self.is_broken(replica)]


_NOTHING_YET = Round()


def replay(state: State, events: Iterable[Event]) -> State:
    """`state` after all of `events`, in their order."""
    return reduce(apply, events, state)


def apply(state: State, event: Event) -> State:  # noqa: PLR0911, PLR0912
    """`state` after `event`. Total: any event that was decided on `state` can be applied to it."""
    match event:
        case CoordinatorStarted():
            return replace(state, started_at=event.at)
        case PeerJoined():
            return _join(state, event)
        case PeerSeen():
            pulse = Pulse(event.at, event.round, event.inner_step, beating=True)
            return replace(state, pulses={**state.pulses, event.peer: pulse})
        case PeerLeft():
            return _gone(state, event.peer, event.finished)
        case PeerLost():
            return _gone(state, event.peer, finished=False)
        case InviteCreated() | InviteUsed() | InviteRevoked():
            return _invitation(state, event)
        case PeerBanned():
            return replace(state, banned={**state.banned, event.peer: event.reason})
        case PeerUnbanned():
            return _unbanned(state, event.peer)
        case PlanAdopted():
            return _adopt(state, event.plan)
        case PayloadOffered():
            return _offer(state, event)
        case PayloadWithheld():
            round = state.round(event.stage, event.round)
            return _with_round(state, event, replace(round, withheld=round.withheld | {event.peer}))
        case GroupClosed():
            return _close(state, event)
        case HoldingsReported():
            round = state.round(event.stage, event.round)
            reports = {**round.reports, event.peer: frozenset(event.owners)}
            return _with_round(state, event, replace(round, reports=reports))
        case PayloadRejected():
            round = state.round(event.stage, event.round)
            reasons = {**round.rejections.get(event.owner, {}), event.peer: event.reason}
            rejections = {**round.rejections, event.owner: reasons}
            return _with_round(state, event, replace(round, rejections=rejections))
        case PeerStruck():
            rounds = (*state.strikes.get(event.peer, ()), event.round)
            return replace(state, strikes={**state.strikes, event.peer: rounds})
        case PeerQuarantined():
            quarantined = state.quarantined | {event.peer}
            return replace(_gone(state, event.peer, finished=False), quarantined=quarantined)
        case RoundCommitted() | RoundAborted():
            return _decided(state, event.at, event.decision)
        case DigestAttested():
            key = (event.stage, event.round, event.part)
            digests = {**state.digests.get(key, {}), event.peer: event.digest}
            return replace(state, digests={**state.digests, key: digests})
        case AnchorDiverged():
            found = (event.peer, event.stage, event.round, event.part)
            return replace(state, diverged=state.diverged | {found})
        case RunFinished():
            return replace(state, phase=Phase.FINISHED, finished_at=event.at)
        case _:
            assert_never(event)


class Draft:
    """A state in the making: what one command decides, event by event, each seen by the next step."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.state = apply(self.state, event)
        self.events.append(event)


def _join(state: State, event: PeerJoined) -> State:
    arrival = state.arrivals + 1
    peer = Peer(event.peer, event.role, event.capacity, event.endpoint, arrival, Lifecycle.READY)
    return replace(
        state,
        arrivals=arrival,
        peers={**state.peers, event.peer: peer},
        pulses={**state.pulses, event.peer: Pulse(event.at)},
    )


def _gone(state: State, peer: PeerId, finished: bool) -> State:
    gone = replace(state.peers[peer], lifecycle=Lifecycle.GONE, finished=finished)
    return replace(state, peers={**state.peers, peer: gone}, losses=state.losses + gone.is_lost)


def _unbanned(state: State, peer: PeerId) -> State:
    """The quarantine and its strikes are forgiven, too."""
    banned = {each: reason for each, reason in state.banned.items() if each != peer}
    strikes = {each: rounds for each, rounds in state.strikes.items() if each != peer}
    return replace(state, banned=banned, strikes=strikes, quarantined=state.quarantined - {peer})


def _invitation(state: State, event: InviteCreated | InviteUsed | InviteRevoked) -> State:
    match event:
        case InviteCreated():
            invitation = Invitation(
                event.invite, event.secret_sha256, event.uses, event.expires_at, event.role
            )
        case InviteUsed():
            former = state.invitations[event.invite]
            invitation = replace(former, peers=(*former.peers, event.peer))
            state = replace(state, enrolled={**state.enrolled, event.peer: event.invite})
        case InviteRevoked():
            invitation = replace(state.invitations[event.invite], revoked=True)
    return replace(state, invitations={**state.invitations, event.invite: invitation})


def _adopt(state: State, plan: Plan) -> State:
    seats = {
        member.peer: Seat(replica, position)
        for replica in plan.replicas
        for position, member in enumerate(replica.members)
    }
    training = {
        peer: replace(state.peers[peer], lifecycle=Lifecycle.TRAINING)
        for peer in seats
        if state.peers[peer].is_live
    }
    return replace(
        state,
        phase=Phase.TRAINING,
        peers={**state.peers, **training},
        plans=(*state.plans, plan),
        seats={**state.seats, plan.epoch: seats},
        current_round=state.current_round or plan.from_round,
    )


def _offer(state: State, event: PayloadOffered) -> State:
    descriptor = event.descriptor
    round = state.round(descriptor.stage, descriptor.round)
    offers = {**round.offers, descriptor.owner: descriptor}
    opened_at = round.opened_at if round.offers else event.at
    rounds = {
        **state.rounds,
        (descriptor.stage, descriptor.round): replace(round, offers=offers, opened_at=opened_at),
    }
    return replace(state, rounds=rounds, active_at=event.at)


def _close(state: State, event: GroupClosed) -> State:
    round = state.round(event.stage, event.round)
    descriptors = (round.offers[owner] for owner in sorted(round.offers))
    agreeing = tuple(d for d in descriptors if d.anchor_digest == event.anchor_digest)
    group = Group(event.group_id, agreeing)
    return _with_round(state, event, replace(round, group=group, closed_at=event.at))


def _with_round(
    state: State, event: PayloadWithheld | GroupClosed | HoldingsReported | PayloadRejected, round: Round
) -> State:
    return replace(state, rounds={**state.rounds, (event.stage, event.round): round}, active_at=event.at)


def _decided(state: State, at: float, decision: Decision) -> State:
    number = decision.round
    state = replace(
        state,
        decisions={**state.decisions, (decision.stage, number): decision},
        committed=state.committed + decision.committed,
        active_at=at,
    )
    if any((stage, number) not in state.decisions for stage in range(state.stages)):
        return state
    oldest = number + 1 - KEPT_ROUNDS
    return replace(
        state,
        current_round=number + 1,
        active_at=None,
        rounds={key: round for key, round in state.rounds.items() if key[1] >= oldest},
        digests={key: digests for key, digests in state.digests.items() if key[1] >= oldest},
    )
