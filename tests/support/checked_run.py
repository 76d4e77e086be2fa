"""A run of the coordinator in which every event is checked, and the invariants that hold after every step."""

from __future__ import annotations

from itertools import pairwise

from hypothesis.stateful import RuleBasedStateMachine, invariant

from coordinator.placement.cost_model import memory_needed
from coordinator.state.events import (
    AssignmentReserved,
    Event,
    PayloadOffered,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
)
from coordinator.state.state import State
from coordinator.status.messages import run_message
from protocol.algorithm.sampling import sample_range
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import Decision, Finding, PeerId, Plan, ReservedAssignment
from tests.builders import keyed
from tests.support.coordinator_run import Run

STAGES = 2
ARBITER = keyed(99)


class CheckedRun(Run):
    """A run in which every single event is checked against the state that it changes."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.had: set[tuple[PeerId, int, int]] = set()

    def apply(self, event: Event) -> None:
        before = self.state
        super().apply(event)
        assert self.state.current_round >= before.current_round
        if isinstance(event, RoundCommitted | RoundAborted):
            decision = event.decision
            assert (decision.stage, decision.round_number) not in before.decisions
            assert decision.next_epoch == self.state.plan_for(decision.round_number + 1).epoch
            # Afterwards the state may have forgotten who was absent.
            self._has_more_than_half(before, decision)
        if isinstance(event, PlanAdopted) and before.plans:
            self._is_sound(before, event.plan)
        if isinstance(event, AssignmentReserved):
            self._has_room(event.reservation)
        self.had |= {
            (place.peer, place.replica, place.position) for place in self.state.reservations.values()
        }

    def _has_more_than_half(self, state: State, decision: Decision) -> None:
        """By weight, no minority of the replicas that might have contributed decides a round."""
        number = decision.round_number
        owners = {entry.descriptor.owner for entry in decision.entries}
        withheld = state.round_of(decision.stage, number).withheld
        hosts = {each.host_of(decision.stage).peer: each.weight for each in state.complete_replicas(number)}
        missing = sum(weight for peer, weight in hosts.items() if peer not in owners | withheld)
        present = sum(
            state.assignment(entry.descriptor.owner, number).replica.weight for entry in decision.entries
        )
        # Half is enough if the others have offered as well, and their payloads cannot count.
        group = state.round_of(decision.stage, number).group
        lacking = {d.owner for d in group.descriptors if d.owner in hosts} - owners if group else set()
        assert not owners or present > missing or (present == missing and lacking)

    def _has_room(self, place: ReservedAssignment) -> None:
        """A peer returns to its former place also if its memory is now too small."""
        memory = self.state.peers[place.peer].capacity.memory_bytes * (1 - self.spec.grouping.reserve)
        members_left = len(self.state.layout(place.replica)) - place.position
        needed = memory_needed(self.spec, place.stages, members_left, "cpu")
        had = (place.peer, place.replica, place.position) in self.had
        assert had or not memory or needed <= memory or len(place.stages) == STAGES

    def _is_sound(self, before: State, plan: Plan) -> None:
        newest = before.plans[-1]
        absent = before.absent.get(newest.epoch, frozenset())
        former = {replica.index: replica for replica in newest.replicas}
        seated = [member.peer for replica in plan.replicas for member in replica.members]
        assert len(set(seated)) == len(seated)
        for replica in plan.replicas:
            members = [member.peer for member in replica.members]
            same = former.get(replica.index)
            stands = same is not None and members == [m.peer for m in same.members]
            stands = stands and not absent.intersection(members)
            assert [s for member in replica.members for s in member.stages] == list(range(STAGES))
            assert all(one.endpoint or other.endpoint for one, other in pairwise(replica.members))
            assert replica.weight == self.spec.microbatches_of(replica) / self.spec.inner.microbatches
            for position, member in enumerate(replica.members):
                known = before.peers[member.peer]
                assert known.is_live
                if stands:
                    continue
                assert known.is_staying
                assert before.reservations[member.peer].stages == member.stages
                self._has_room(ReservedAssignment(member.peer, replica.index, position, member.stages))
                for stage in member.stages:
                    assert before.synced.get(member.peer, {}).get(stage, -1) >= max(0, plan.from_round - 2)
        total = sum(map(self.spec.microbatches_of, plan.replicas))
        assert total == len(plan.replicas) * self.spec.inner.microbatches
        for replica in newest.replicas:
            members = [member.peer for member in replica.members]
            # A peer with a new role has a reservation elsewhere.
            places = [before.reservations.get(p) for p in members]
            keep_theirs = all(place is not None and place.replica == replica.index for place in places)
            could_stay = keep_theirs and all(p not in absent and before.peers[p].is_staying for p in members)
            assert not could_stay or set(members) <= set(seated) or "takes the place of" in plan.reason
        assert plan.reason


class CheckedMachine(RuleBasedStateMachine):
    """The invariants of any run. A test adds the rules by which peers act.

    Attributes:
        decisions: those that were checked, by (stage, round).
        held: the owners of the payloads that each peer has reported, by (stage, round) and peer.
    """

    run: CheckedRun
    decisions: dict[tuple[int, int], Decision]
    held: dict[tuple[int, int], dict[PeerId, set[PeerId]]]

    @invariant()
    def no_banned_peer_takes_part(self) -> None:
        state = self.run.state
        assert not any(state.peers[peer].is_live for peer in state.banned if peer in state.peers)

    @invariant()
    def decisions_are_single_and_final(self) -> None:
        found = [e.decision for e in self.run.events if isinstance(e, RoundCommitted | RoundAborted)]
        by_key = {(decision.stage, decision.round_number): decision for decision in found}
        assert len(by_key) == len(found)
        assert by_key == self.run.state.decisions
        for key, decision in self.decisions.items():
            assert by_key[key] == decision
        for key in by_key.keys() - self.decisions.keys():
            self._is_founded(by_key[key])
        self.decisions = by_key

    def _is_founded(self, decision: Decision) -> None:
        """Checked once, in the state right after the decision."""
        state, number = self.run.state, decision.round_number
        offered = [e.descriptor for e in self.run.events if isinstance(e, PayloadOffered)]
        need = max(1, min(2, len(state.complete_replicas(number))))
        assert decision.committed == bool(decision.entries)
        assert decision.reason
        assert [e.descriptor.owner for e in decision.entries] == sorted(
            e.descriptor.owner for e in decision.entries
        )
        assert len({e.descriptor.anchor_digest for e in decision.entries}) <= 1
        for entry in decision.entries:
            assert entry.descriptor in offered
            assignment = state.assignment(entry.descriptor.owner, number)
            assert assignment is not None
            assert decision.stage in assignment.member.stages
            owner, contest = entry.descriptor.owner, state.round_of(decision.stage, number).contest
            # Payloads that were no part of a contest had enough holders when it began.
            had_enough = contest is not None and owner not in {*contest.owners, *contest.left_out}
            assert len(entry.holders) >= need or had_enough or ARBITER.peer in entry.holders
            for holder in set(entry.holders) - {ARBITER.peer}:
                assert owner in self.held[decision.stage, number][holder]
            if ARBITER.peer in entry.holders:
                assert contest is not None
                assert contest.verdicts[owner].finding is Finding.HELD

    @invariant()
    def a_place_has_one_peer_and_a_seat_its_place(self) -> None:
        state = self.run.state
        places = [(place.replica, place.position) for place in state.reservations.values()]
        assert len(set(places)) == len(places)
        for peer, assignment in state.assignments[len(state.plans)].items() if state.plans else ():
            if state.takes_part(peer, state.plans[-1].from_round) and state.peers[peer].is_staying:
                place = state.reservations[peer]
                assert (place.replica, place.position) == (assignment.replica.index, assignment.position)

    @invariant()
    def plans_follow_one_another(self) -> None:
        plans = self.run.state.plans
        assert [plan.epoch for plan in plans] == list(range(1, len(plans) + 1))
        assert all(a.from_round <= b.from_round for a, b in pairwise(plans))
        assert plans == tuple(e.plan for e in self.run.events if isinstance(e, PlanAdopted))

    @invariant()
    def sample_ranges_tile(self) -> None:
        state = self.run.state
        ranges = [
            sample_range(plan, self.run.spec, number, replica.index)
            for number in range(1, state.current_round + 1)
            for plan in [state.plan_for(number)]
            for replica in plan.replicas
        ]
        stops = [0, *(part.stop for part in ranges)]
        assert [part.start for part in ranges] == stops[:-1]

    @invariant()
    def there_is_always_a_sentence(self) -> None:
        assert run_message(self.run.state)

    @invariant()
    def a_finished_run_has_decided_everything(self) -> None:
        if self.run.state.phase is RunPhase.FINISHED:
            assert len(self.run.state.decisions) == STAGES * self.run.spec.rounds
