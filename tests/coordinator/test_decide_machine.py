"""Random runs of the coordinator: whatever peers do, decisions stay single, final and founded, no plan seats
who has not caught up, and as soon as peers behave the run goes on.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from coordinator.placement.cost_model import memory_needed
from coordinator.placement.replan import filled_replicas
from coordinator.rounds.attestation import expected_digest
from coordinator.state.apply import replay
from coordinator.state.commands import (
    Attest,
    Await,
    Ban,
    Drain,
    Heartbeat,
    Leave,
    Offer,
    Report,
    Retreat,
    Start,
    Tick,
    Unban,
)
from coordinator.state.event_codec import decode, encode
from coordinator.state.events import (
    AssignmentReserved,
    Event,
    PayloadOffered,
    PayloadWithheld,
    PeerSeen,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
)
from coordinator.state.state import State
from coordinator.status.messages import run_message
from protocol.algorithm.sampling import sample_range
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import Decision, PayloadDescriptor, PeerId, Plan, ReservedAssignment, Role
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import Run, measure

STAGES = 2
ROUNDS = 6
ROLES = [*[Role.REPLICA] * 2, *[Role.STAGE] * 6]
PEERS = [keyed(i) for i in range(len(ROLES))]
TIGHT = 1_550_000
"""Bytes of memory that hold the last stage and not the first."""
who = st.sampled_from(PEERS)
few = st.sampled_from([set(), set(), set(), *({peer} for peer in PEERS), set(PEERS[:2]), set(PEERS[1:])])
stages = st.integers(0, STAGES - 1)
shifts = st.sampled_from([0] * 8 + [-1, 1])


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
        if isinstance(event, PlanAdopted) and before.plans:
            self._is_sound(before, event.plan)
        if isinstance(event, AssignmentReserved):
            self._has_room(event.reservation)
        self.had |= {
            (place.peer, place.replica, place.position) for place in self.state.reservations.values()
        }

    def _has_room(self, place: ReservedAssignment) -> None:
        """Who had that very place before has it back, whatever its memory is by now."""
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
            could_stay = all(p not in absent and before.peers[p].is_staying for p in members)
            assert not could_stay or set(members) <= set(seated) or "takes the place of" in plan.reason
        assert plan.reason


class RandomRun(RuleBasedStateMachine):
    """Two full replicas, a pipeline of two and stage peers beyond, honest, late, absent and confused."""

    payloads = Bundle("payloads")

    @initialize(target=payloads, gathered=st.sampled_from([True] * 4 + [False]), spares=st.integers(0, 2))
    def begin(self, gathered: bool, spares: int) -> object:
        options = {"grouping__spares": spares, "grouping__settle_rounds": 1, "inner__microbatches": 3}
        links = {"link__least_k": 2, "link__most_k": 16}
        self.run = CheckedRun(spec_of(STAGES, 2, 1, ROUNDS, **options, **links))
        self.run.accept(Start())
        self.decisions: dict[tuple[int, int], Decision] = {}
        self.held: dict[tuple[int, int], dict[PeerId, set[PeerId]]] = defaultdict(lambda: defaultdict(set))
        if gathered:
            for peer, role in list(zip(PEERS, ROLES, strict=True))[:4]:
                self.run.accept(peer.join(self.run.spec, role))
        return multiple()

    @property
    def number(self) -> int:
        return self.run.state.current_round

    @rule(
        i=st.integers(0, len(PEERS) - 1),
        role=st.sampled_from(Role),
        endpoint=st.sampled_from(["", "h:1"]),
        memory_bytes=st.sampled_from([0, 1000, TIGHT, 2**30, 2**30]),
    )
    def join(self, i: int, role: Role, endpoint: str, memory_bytes: int) -> None:
        self.run.send(PEERS[i].join(self.run.spec, role, endpoint, memory_bytes))

    @rule(peer=who, ban=st.sampled_from([False] * 3 + [True]))
    def ban_or_unban(self, peer: Keyed, ban: bool) -> None:
        self.run.accept(Ban(peer.peer, "a test") if ban else Unban(peer.peer))

    @invariant()
    def no_banned_peer_takes_part(self) -> None:
        state = self.run.state
        assert not any(state.peers[peer].is_live for peer in state.banned if peer in state.peers)

    @precondition(lambda self: self.run.state.phase is not RunPhase.GATHERING)
    @rule(
        target=payloads, peer=who, stage=stages, shift=shifts, anchor=st.sampled_from([None] * 6 + ["other"])
    )
    def offer(self, peer: Keyed, stage: int, shift: int, anchor: str | None) -> PayloadDescriptor:
        payload = peer.payload(self.run.spec, stage, max(1, self.number + shift), anchor)
        self.run.send(Offer(peer.peer, payload))
        return payload

    @rule(peer=who, held=st.lists(payloads, max_size=4), stage=stages)
    def report(self, peer: Keyed, held: list[PayloadDescriptor], stage: int) -> None:
        number = held[0].round_number if held else self.number
        self._report(peer, held[0].stage if held else stage, number, tuple(held))

    def _report(self, peer: Keyed, stage: int, number: int, held: tuple[PayloadDescriptor, ...]) -> None:
        if self.run.send(Report(peer.peer, stage, number, held)).refusal is None:
            # A report after the decision is counted here too: decisions were checked when they were made.
            self.held[stage, number][peer.peer] |= {d.owner for d in held}

    def _hosts(self, stage: int, absent: set[Keyed]) -> list[Keyed]:
        assignments = [(peer, self.run.state.assignment(peer.peer, self.number)) for peer in PEERS]
        return [
            p
            for p, assignment in assignments
            if assignment and stage in assignment.member.stages and p not in absent
        ]

    @precondition(lambda self: 1 <= self.number <= ROUNDS)
    @rule(stage=stages, absent=few, good=st.integers(0, 5))
    def hosts_offer(self, stage: int, absent: set[Keyed], good: int) -> None:
        """Without this and the next two, random steps would rarely get a run anywhere."""
        number = self.number
        for peer in self._hosts(stage, absent):
            anchor = None if good else f"of {peer.number}"
            self._offer(peer, stage, number, anchor)

    def _offer(self, peer: Keyed, stage: int, number: int, anchor: str | None) -> None:
        """With the weight that the plan gives it, if any."""
        assignment = self.run.state.assignment(peer.peer, number)
        payload = peer.payload(
            self.run.spec, stage, number, anchor, assignment.replica.weight if assignment else 1.0
        )
        self.run.send(Offer(peer.peer, payload))

    @precondition(lambda self: 1 <= self.number <= ROUNDS)
    @rule(stage=stages, absent=few, lacked=few)
    def hosts_report(self, stage: int, absent: set[Keyed], lacked: set[Keyed]) -> None:
        number = self.number
        group = self.run.state.round_of(stage, number).group
        lacked_ids = {peer.peer for peer in lacked}
        for peer in self._hosts(stage, absent) if group else []:
            held = tuple(d for d in group.descriptors if d.owner == peer.peer or d.owner not in lacked_ids)
            self._report(peer, stage, number, held)

    @precondition(lambda self: self.number > 0)
    @rule(peer=who, stage=stages, shift=shifts, withholds=st.booleans())
    def await_decision(self, peer: Keyed, stage: int, shift: int, withholds: bool) -> None:
        epoch = self.run.state.plan_for(self.number).epoch if withholds else 0
        events = self.run.send(Await(peer.peer, stage, max(1, self.number + shift), epoch)).events
        assert withholds or not any(isinstance(event, PayloadWithheld) for event in events)

    @precondition(lambda self: 1 <= self.number <= ROUNDS)
    @rule(absent=few)
    def a_round_goes_well(self, absent: set[Keyed]) -> None:
        number = self.number
        for stage in range(STAGES):
            self.hosts_offer(stage, absent, good=1)
            if self.number == number:
                self.hosts_report(stage, absent, set())
            for peer in self._hosts(stage, absent):
                self.run.send(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))
            self.decisions_are_single_and_final()
        self.all_peers_follow(absent)

    @precondition(lambda self: self.number > 0)
    @rule(absent=few)
    def all_peers_follow(self, absent: set[Keyed]) -> None:
        for peer in PEERS:
            if peer not in absent:
                self._follow(peer, self.number - 1)

    @precondition(lambda self: self.run.state.phase is RunPhase.TRAINING)
    @rule(absent=few)
    def stage_peers_come(self, absent: set[Keyed]) -> None:
        for peer, role in zip(PEERS, ROLES, strict=True):
            if role is Role.STAGE and peer not in absent:
                self.run.send(peer.join(self.run.spec, role))
        self.all_peers_follow(absent)

    @precondition(lambda self: self.number > 1)
    @rule(stage=stages, absent=few)
    def hosts_attest(self, stage: int, absent: set[Keyed]) -> None:
        for peer in self._hosts(stage, absent):
            number = self.number - 1
            self.run.send(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))

    @rule(
        peer=who, stage=stages, shift=shifts, part=st.sampled_from(["stage", "embedding"]), good=st.booleans()
    )
    def attest(self, peer: Keyed, stage: int, shift: int, part: str, good: bool) -> None:
        number = max(0, self.number - 1 + shift)
        self.run.send(Attest(peer.peer, stage, number, part, anchor_of(stage, number) if good else "other"))

    @rule(peer=who, reason=st.sampled_from(["finished", "interrupted"]), sure=st.integers(0, 5))
    def leave(self, peer: Keyed, reason: str, sure: int) -> None:
        if sure == 0:
            self.run.send(Leave(peer.peer, reason))

    @rule(peer=who, sure=st.integers(0, 2))
    def drain(self, peer: Keyed, sure: int) -> None:
        if sure == 0:
            self.run.send(Drain(peer.peer, "a test"))

    @rule(
        peer=who,
        flops=st.sampled_from([0.0, 1e8, 1e9]),
        bandwidth=st.sampled_from([0.0, 1e4, 1e7]),
        seconds=st.sampled_from([0.0, 0.5, 3.0]),
    )
    def measure(self, peer: Keyed, flops: float, bandwidth: float, seconds: float) -> None:
        known = self.run.state.peers.get(peer.peer)
        if known is not None and known.is_live:
            measure(self.run, peer, flops, bandwidth, seconds)

    @rule(seed=st.integers(0, 255))
    def all_peers_measure(self, seed: int) -> None:
        for i, peer in enumerate(PEERS):
            self.measure(peer, flops=1e9 if seed >> i & 1 else 1e8, bandwidth=1e7, seconds=0.0)

    @precondition(lambda self: self.run.state.plans)
    @rule(peer=who, older=st.sampled_from([0, 0, 1]))
    def retreat(self, peer: Keyed, older: int) -> None:
        self.run.send(Retreat(peer.peer, len(self.run.state.plans) - older, "a test"))

    @precondition(lambda self: self.number > 0)
    @rule(peer=who)
    def dies_and_comes_back(self, peer: Keyed) -> None:
        """With an empty disk, or with all that it had: what it attests tells."""
        self.run.now += 2 * self.run.spec.timing.heartbeat + 1
        for other in PEERS:
            if other is not peer:
                self.run.send(Heartbeat(other.peer, self.number, 0))
        self.run.send(peer.join(self.run.spec, ROLES[peer.number]))

    @precondition(lambda self: self.number > 0)
    @rule(peer=who, behind=st.sampled_from([0, 0, 0, 1, 2]))
    def follow(self, peer: Keyed, behind: int) -> None:
        self._follow(peer, max(0, self.number - 1 - behind))

    def _follow(self, peer: Keyed, number: int) -> None:
        place = self.run.state.reservations.get(peer.peer)
        for stage in place.stages if place else ():
            digest = self._anchor(stage, number)
            self.run.send(Attest(peer.peer, stage, number, "stage", digest))
        if place:
            digest = expected_digest(self.run.state, 0, number, "embedding") or "table"
            self.run.send(Attest(peer.peer, 0, number, "embedding", digest))

    def _anchor(self, stage: int, number: int) -> str:
        """What a peer has that believes the others."""
        return expected_digest(self.run.state, stage, number, "stage") or anchor_of(stage, number)

    @precondition(lambda self: 1 <= self.number <= ROUNDS)
    @rule(endpoint=st.sampled_from(["", "h:1"]))
    def the_run_goes_on_when_peers_behave(self, endpoint: str) -> None:
        """Each peer that may comes back, follows, and trains if a plan assigns it."""
        number = self.number
        for _ in range(60):
            self.run.now += self.run.spec.timing.heartbeat + 1
            for peer in PEERS:
                beat = self.run.send(Heartbeat(peer.peer, number, 0))
                if beat.refusal is not None:
                    self.run.send(peer.join(self.run.spec, ROLES[peer.number], endpoint or "h:1"))
            self.run.accept(Tick())
            for peer in PEERS:
                self._follow(peer, number - 1)
            for stage in range(STAGES):
                for peer in self._hosts(stage, set()):
                    anchor = self._anchor(stage, number - 1)
                    self._offer(peer, stage, number, anchor)
                self.hosts_report(stage, set(), set())
            self.decisions_are_single_and_final()
            if self.number > number:
                return
        assert not filled_replicas(self.run.state)

    @precondition(lambda self: self.number > ROUNDS and self.run.state.phase is RunPhase.TRAINING)
    @rule()
    def the_run_ends_when_peers_behave(self) -> None:
        for peer in PEERS:
            self.run.send(peer.join(self.run.spec, ROLES[peer.number], "h:1"))
            self._follow(peer, ROUNDS)
        hosted = {
            s
            for p in self.run.state.reservations.values()
            if self.run.state.peers[p.peer].is_live
            for s in p.stages
        }
        assert self.run.state.phase is RunPhase.FINISHED or len(hosted) < STAGES

    @rule(dead=few, seconds=st.sampled_from([0.2, 14.0, 60.0, 125.0]))
    def time_passes(self, dead: set[Keyed], seconds: float) -> None:
        self.run.now += seconds
        for peer in PEERS:
            if peer not in dead:
                self.run.send(Heartbeat(peer.peer, self.number, 0))
        self.run.accept(Tick())

    @rule()
    def the_coordinator_restarts(self) -> None:
        stored = [encode(event) for event in self.run.events if not isinstance(event, PeerSeen)]
        state = replay(State.of(self.run.spec), (decode(kind, text) for kind, text in stored))
        assert state == self.run.state
        self.run.state = state
        self.run.accept(Start())

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
            assert len(entry.holders) >= need
            for holder in entry.holders:
                assert entry.descriptor.owner in self.held[decision.stage, number][holder]

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
        assert run_message(self.run.state, self.run.spec)

    @invariant()
    def a_finished_run_has_decided_everything(self) -> None:
        if self.run.state.phase is RunPhase.FINISHED:
            assert len(self.run.state.decisions) == STAGES * self.run.spec.rounds


TestRandomRuns = RandomRun.TestCase
TestRandomRuns.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
