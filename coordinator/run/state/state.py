"""The coordinator's state as frozen records, with the queries that the rules share.

Nothing here reads a clock or does IO. A replay of the stored events (coordinator.run.state.apply) gives the
same state, except for `State.last_seen`: heartbeats change it and are not stored.

One file because the state is one record, and its queries explain its fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from coordinator.base.persistent_map import PersistentMap
from coordinator.run.state.records import (
    Alarm,
    Assignment,
    Barren,
    Break,
    FailedLink,
    Invitation,
    LastSeen,
    OpenPlace,
    Peer,
    Round,
    Silence,
)
from protocol.math.embedding_snapshot import needed_snapshots
from protocol.math.retention import is_kept
from protocol.spec.change import changed
from protocol.spec.run import RunSpec
from protocol.status import ModelEvaluation, RunPhase
from protocol.types import (
    Decision,
    Estimates,
    Pause,
    PeerId,
    Plan,
    RelayAddress,
    Replica,
    ReservedAssignment,
    Role,
    RunChange,
    StageRange,
)

KEPT_ROUNDS = 8
"""Rounds whose offers, reports and digests are kept for late callers."""
KEPT_DECISIONS = 32
"""Rounds whose decisions and plans are kept. Older decisions are in the event log
(coordinator.store.decision_log), and so are older plans."""
KEPT_CHECKPOINTS = 3
"""Checkpoint rounds before those whose digests are kept."""
APART_ROUNDS = 8
"""Rounds for which two peers are not made neighbours after their link has failed."""
KEPT_PHASES, KEPT_DURATIONS = 3, 5
"""Inner phases of a replica, and rounds, whose durations are kept: few, since machines change their speed."""


@dataclass(frozen=True)
class State:
    """All that the coordinator knows. Before the first event, only `spec` and `run` are set.

    Rounds count from 1. A replica is named by its index, a plan by its epoch.

    Attributes:
        run: the id of the run (:mod:`protocol.trust.run_id`).
        latest_at: time of the newest stored event.
        arrivals: joins so far.
        estimates: what each peer has measured since it joined.
        report_times: how often each peer has reported estimates since it joined, and when it did last.
        reservations: kept for peers from plan to plan.
        assignments: by epoch and peer, of the plans that still matter.
        assigned_replicas: the replicas that were in a plan at least once.
        absent: by epoch, the members that were lost, retreated or diverged since the plan was made. Their
            replicas are broken under that plan even when they are back.
        breaks: by peer, of those that have retreated in the current round.
        synced: by peer and stage, the last round of which it attested the right digest since it joined.
        retreats: by replica, the number of rounds in which it retreated since its last committed payload, and
            the last of them.
        failures: by peer, the number of rounds in which it was lost, left without draining, or retreated, and
            the last of them. Each round that commits a payload of the peer takes one off.
        failed_links: by dialling peer and neighbour, until their replica offers a payload or one of the two
            joins again or has other addresses; those of frames for APART_ROUNDS rounds.
        layouts: by replica, the stages of each position; they never change.
        moved_at: by peer, the round in which it last got a reservation with other stages.
        rebalanced_at: first round of the newest plan that only made the run faster: it exchanged peers that
            could have stayed, or divided the microbatches anew. 0 before any.
        current_round: the first round that is not decided at every stage; 0 before the run starts,
            ``spec.rounds + 1`` after its last decision.
        began_at: when the current round began, or its plan was replaced.
        round_durations: seconds of the last rounds from begin to end, the oldest first.
        opened_at: when the first payload of the current round was offered or its first stage decided.
        answered: by replica, when its first payload of the current round was offered or withheld.
        phase_seconds: by replica, the seconds per unit of work of its last inner phases, the oldest first:
            from the beginning of the round to its first answer.
        silences: by peer, the rounds without its answer, for peers that lacked in one of the last rounds.
        barren: by replica and stage, the rounds with a withheld payload, for those that have withheld lately.
        promised: by peer, when it got its reservation or attested a recent anchor.
        rounds, decisions: by (stage, round), those of the last rounds.
        decided: decisions so far.
        tokens: those whose training is committed.
        tokens_at: `tokens` at the end of each round to which the run may go back.
        settlement_notes: by peer, two numbers that the settlement of the run keeps and reads alone
            (coordinator.run.state.settlement).
        strikes: by peer, the rounds for which it got a strike.
        discounted: the peers whose payloads count for nothing until their scores are good.
        digests, digest_changes: by (stage, round, part) and peer; how often the peer has replaced its digest.
        committed, committed_at: decisions that committed payloads, and when the newest of them was made.
        skipped: decisions about stages that had no turn in their round.
        diverged: (peer, stage, round, part) whose anchor differed, until the peer attests the right digest.
        enrolled: the peers that may have certificates, with the last invite of each.
        open_places: of peers without an invite, in the order in which they came.
        banned: the peers that the operator excludes, with the reasons.
        names: public names that peers have chosen; None where the operator refuses the peer any.
        owners: of peers, one after the other; the credit of a peer is its last one's.
        arbiter: the coordinator's own peer, which fetches contested payloads; None if no peer does.
        own_uplinks: bytes per second that the coordinator's own relay can send, by its endpoint, if known.
        unfound: by owner, the last round in which the arbiter could not fetch its payload.
        pause: None while the run is not paused.
        alarm: the newest that was raised; None before any.
        restored: by round whose decisions are a rollback, the round whose anchors it restores.
        restored_digests: by (stage, round, part), the digests of the anchors after these rounds.
        changes: all of the run, by their first rounds. `spec` has those that hold in the current one.
        evaluations: by peer and name, the newest that was told.
        first_spec: the specification with which the run began; None if it was not changed.
    """

    spec: RunSpec
    run: str
    phase: RunPhase = RunPhase.GATHERING
    latest_at: float = 0.0
    started_at: float = 0.0
    term: int = 0
    finished_at: float = 0.0
    arrivals: int = 0
    peers: PersistentMap[PeerId, Peer] = field(default_factory=PersistentMap)
    last_seen: PersistentMap[PeerId, LastSeen] = field(default_factory=PersistentMap, compare=False)
    estimates: PersistentMap[PeerId, Estimates] = field(default_factory=PersistentMap)
    report_times: PersistentMap[PeerId, tuple[int, float]] = field(default_factory=PersistentMap)
    reservations: PersistentMap[PeerId, ReservedAssignment] = field(default_factory=PersistentMap)
    plans: tuple[Plan, ...] = ()
    assignments: Mapping[int, Mapping[PeerId, Assignment]] = field(default_factory=dict)
    assigned_replicas: frozenset[int] = frozenset()
    absent: Mapping[int, frozenset[PeerId]] = field(default_factory=dict)
    breaks: Mapping[PeerId, Break] = field(default_factory=dict)
    synced: PersistentMap[PeerId, Mapping[int, int]] = field(default_factory=PersistentMap)
    retreats: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    failures: Mapping[PeerId, tuple[int, int]] = field(default_factory=dict)
    failed_links: Mapping[tuple[PeerId, PeerId], FailedLink] = field(default_factory=dict)
    layouts: Mapping[int, tuple[StageRange, ...]] = field(default_factory=dict)
    moved_at: Mapping[PeerId, int] = field(default_factory=dict)
    rebalanced_at: int = 0
    current_round: int = 0
    began_at: float = 0.0
    round_durations: tuple[float, ...] = ()
    opened_at: float | None = None
    answered: PersistentMap[int, float] = field(default_factory=PersistentMap)
    phase_seconds: PersistentMap[int, tuple[float, ...]] = field(default_factory=PersistentMap)
    silences: Mapping[PeerId, Silence] = field(default_factory=dict)
    barren: Mapping[tuple[int, int], Barren] = field(default_factory=dict)
    promised: PersistentMap[PeerId, float] = field(default_factory=PersistentMap)
    rounds: Mapping[tuple[int, int], Round] = field(default_factory=dict)
    decisions: PersistentMap[tuple[int, int], Decision] = field(default_factory=PersistentMap)
    decided: int = 0
    tokens: int = 0
    tokens_at: Mapping[int, int] = field(default_factory=dict)
    settlement_notes: Mapping[PeerId, tuple[int, int]] = field(default_factory=dict)
    strikes: Mapping[PeerId, tuple[int, ...]] = field(default_factory=dict)
    discounted: frozenset[PeerId] = frozenset()
    quarantined: frozenset[PeerId] = frozenset()
    digests: Mapping[tuple[int, int, str], PersistentMap[PeerId, str]] = field(default_factory=dict)
    digest_changes: Mapping[tuple[int, int, str], Mapping[PeerId, int]] = field(default_factory=dict)
    committed: int = 0
    skipped: int = 0
    committed_at: float = 0.0
    diverged: frozenset[tuple[PeerId, int, int, str]] = frozenset()
    invitations: Mapping[str, Invitation] = field(default_factory=dict)
    enrolled: PersistentMap[PeerId, str] = field(default_factory=PersistentMap)
    open_places: Mapping[PeerId, OpenPlace] = field(default_factory=dict)
    banned: Mapping[PeerId, str] = field(default_factory=dict)
    names: PersistentMap[PeerId, str | None] = field(default_factory=PersistentMap)
    owners: PersistentMap[PeerId, tuple[PeerId, ...]] = field(default_factory=PersistentMap)
    arbiter: PeerId | None = None
    own_uplinks: Mapping[str, float] = field(default_factory=dict)
    unfound: Mapping[PeerId, int] = field(default_factory=dict)
    pause: Pause | None = None
    alarm: Alarm | None = None
    restored: Mapping[int, int] = field(default_factory=dict)
    restored_digests: Mapping[tuple[int, int, str], str] = field(default_factory=dict)
    changes: tuple[RunChange, ...] = ()
    evaluations: PersistentMap[tuple[PeerId, str], ModelEvaluation] = field(default_factory=PersistentMap)
    first_spec: RunSpec | None = None

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.spec.swarm.stages

    def spec_under(self, plan: Plan) -> RunSpec:
        """The specification of the rounds of a plan."""
        return self.spec if self.first_spec is None else changed(self.first_spec, plan.changes)

    def changes_until(self, round_number: int) -> tuple[RunChange, ...]:
        """The changes that hold in a round."""
        return tuple(each for each in self.changes if each.from_round <= round_number)

    @property
    def aborted(self) -> int:
        """Decisions that aborted their (stage, round); those of a rollback or of a skipped stage are none."""
        return self.decided - self.committed - self.skipped - len(self.restored) * self.stages

    def name_of(self, peer: PeerId) -> str:
        """The public name of `peer`, or ""."""
        return self.names.get(peer) or ""

    @property
    def rounds_decided(self) -> int:
        """Rounds that are decided at every stage."""
        return max(0, self.current_round - 1)

    @property
    def is_held(self) -> bool:
        """Whether the run is paused and the current round has not begun: its replicas wait."""
        return self.pause is not None and self.pause.holds(self.current_round)

    @property
    def excluded(self) -> frozenset[PeerId]:
        """The peers that are banned or in quarantine. All other peers refuse their connections."""
        return self.quarantined | self.banned.keys()

    @property
    def placed(self) -> frozenset[PeerId]:
        """The peers that have a reservation or an assignment in one of the last two plans."""
        assigned = (peer for plan in self.plans[-2:] for peer in self.assignments.get(plan.epoch, ()))
        return frozenset((*assigned, *self.reservations))

    @property
    def live(self) -> int:
        """The number of live peers."""
        return sum(peer.is_live for peer in self.peers.values())

    @property
    def staying(self) -> list[Peer]:
        """The peers that may be in a later plan."""
        return [peer for peer in self.peers.values() if peer.is_staying]

    @property
    def relays(self) -> tuple[RelayAddress, ...]:
        """The relays that have joined, in order of arrival."""
        found = [peer for peer in self.peers.values() if peer.role is Role.RELAY and peer.is_live]
        found.sort(key=lambda peer: peer.arrival)
        return tuple(RelayAddress(peer.peer, peer.endpoint) for peer in found if peer.endpoint)

    def layout(self, replica: int) -> tuple[StageRange, ...]:
        """The stages of each position of `replica`.

        A new pipeline gets the most frequent layout of the newest plan, or one stage for each position if
        that plan has no pipeline.
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

    def is_decided(self, stage: int, round_number: int) -> bool:
        """Whether the decision of (`stage`, `round_number`) is made, be it kept here or not."""
        is_past = 0 <= stage < self.stages and 1 <= round_number < self.current_round
        return is_past or (stage, round_number) in self.decisions

    @property
    def epoch(self) -> int:
        """Of the newest plan; 0 before the first one."""
        return self.plans[-1].epoch if self.plans else 0

    def plan_of(self, epoch: int) -> Plan | None:
        """The plan of `epoch`; None if it is not kept, or not known."""
        first = self.plans[0].epoch if self.plans else 0
        return self.plans[epoch - first] if first <= epoch <= self.epoch and epoch else None

    def plan_for(self, round_number: int) -> Plan:
        """The plan under which `round_number` runs; the first that is kept for earlier rounds."""
        later_first = reversed(self.plans)
        return next((plan for plan in later_first if plan.from_round <= round_number), self.plans[0])

    def assignment(self, peer: PeerId, round_number: int) -> Assignment | None:
        """The assignment of `peer` in `round_number`; None without one, or for a round that is not kept."""
        return self.assignments.get(self.plan_for(round_number).epoch, {}).get(peer) if self.plans else None

    def standing_epoch(self, peer: PeerId, epoch: int) -> int:
        """The epoch under which an assignment of `peer` in plan `epoch` stands.

        It is that of the current round's plan where that plan repairs the other and leaves the assignment.
        """
        plan = self.plan_for(self.current_round)
        former, newer = (self.assignments.get(each, {}).get(peer) for each in (epoch, plan.epoch))
        return plan.epoch if plan.goes_on_from(epoch) and former == newer is not None else epoch

    def takes_part(self, peer: PeerId, round_number: int) -> bool:
        """Whether `peer` is assigned in `round_number` and was never absent since its plan was made."""
        epoch = self.plan_for(round_number).epoch if self.plans else 0
        return peer in self.assignments.get(epoch, {}) and peer not in self.absent.get(epoch, ())

    def has_entered(self, peer: PeerId) -> bool:
        """Whether `peer` has its seat since the current round, by a repair."""
        plan = self.plan_for(self.current_round)
        former, newer = (self.assignments.get(each, {}).get(peer) for each in (plan.repairs, plan.epoch))
        is_here = former is not None and newer is not None and former.replica.index == newer.replica.index
        return plan.from_round == self.current_round and bool(plan.repairs and newer) and not is_here

    def may_offer(self, peer: PeerId, round_number: int) -> bool:
        """Whether what `peer` has trained in `round_number` may count: also after it retreated from a replica
        that has broken. Not after it joined again, since it may have lost that, nor from another anchor.
        """
        known, epoch = self.peers[peer], self.plan_for(round_number).epoch if self.plans else 0
        is_same = known.is_live and known.joined_at < self.began_at
        is_sound = is_same and not any(peer == found for found, *_ in self.diverged)
        return self.takes_part(peer, round_number) or (is_sound and peer in self.assignments.get(epoch, {}))

    def complete_replicas(self, round_number: int) -> list[Replica]:
        """The replicas of `round_number` in which every member takes part and no link has failed."""
        return list(self._complete(round_number))

    def has_complete_replica(self, round_number: int) -> bool:
        """Whether :meth:`complete_replicas` has any with weight; every tick asks this, of up to thousands."""
        return any(map(self.has_weight, self._complete(round_number)))

    def has_weight(self, replica: Replica) -> bool:
        """Whether payloads of `replica` count: it has a member with weight, and none that is unproven."""
        peers = [member.peer for member in replica.members]
        return not self.discounted or not (any(map(self.is_unproven, peers)) or self.discounted >= {*peers})

    def is_unproven(self, peer: PeerId) -> bool:
        """Whether `peer` came without an invite, and its scores do not speak for it."""
        return peer in self.discounted and peer in self.open_places

    def is_weightless(self, owner: PeerId, round_number: int) -> bool:
        """Whether a payload of `owner` counts for nothing."""
        assignment = self.assignment(owner, round_number)
        return owner in self.discounted or (
            assignment is not None and not self.has_weight(assignment.replica)
        )

    def _complete(self, round_number: int) -> Iterator[Replica]:
        plan = self.plan_for(round_number)
        absent = self.absent.get(plan.epoch, frozenset())
        failed = {each.replica for each in self.failed_links.values() if each.epoch == plan.epoch}
        possible = (each for each in plan.replicas if each.index not in failed)
        return (each for each in possible if absent.isdisjoint(member.peer for member in each.members))

    def has_attested(self, peer: PeerId, round_number: int) -> bool:
        """Whether `peer` has attested the right digest of every stage that it hosts after `round_number`."""
        reservation, assignment = self.reservations.get(peer), self.assignment(peer, round_number)
        # Another peer may have got the reservation of a draining member.
        hosted = reservation or (assignment.member if assignment else None)
        rounds = self.synced.get(peer, {})
        return hosted is not None and all(rounds.get(stage, -1) >= round_number for stage in hosted.stages)

    def needs_snapshot(self, round_number: int) -> bool:
        """Whether links use the snapshot of the embedding after `round_number` in the open round or later."""
        every = self.spec.link.embedding_every
        # Stage 0 may be decided, and have its snapshot, before the other stages.
        coming = max(self.current_round, round_number + 1)
        return every > 0 and round_number in needed_snapshots(coming, every, self.restored)

    def keeps_digests(self, round_number: int) -> bool:
        """Whether digests of the anchors after `round_number` are still kept."""
        if round_number >= self.current_round - KEPT_ROUNDS:
            return True
        # Peers that come back download checkpoints, and need their digests for longer.
        every = self.spec.recovery.checkpoint_every
        oldest = self.rounds_decided - KEPT_CHECKPOINTS * every
        if (round_number % every == 0 and round_number > oldest) or self.needs_snapshot(round_number):
            return True
        # A rollback needs those of the anchors that nodes keep for it, and of the initial parameters.
        return round_number == 0 or is_kept(round_number, self.rounds_decided, every)


_NOTHING_YET = Round()
