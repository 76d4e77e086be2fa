"""Random runs of the coordinator: whatever peers do, decisions stay single, final and founded."""

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

from coordinator.codec import decode, encode
from coordinator.events import PayloadOffered, PeerSeen, PlanAdopted, RoundAborted, RoundCommitted
from coordinator.sentences import sentence
from coordinator.state import Phase, State, replay
from coordinator.transition import Attest, Await, Ban, Heartbeat, Leave, Offer, Report, Start, Tick, Unban
from protocol.samples import sample_range
from protocol.types import Decision, PayloadDescriptor, PeerId, Role
from tests.swarm import Keyed, Run, anchor_of, keyed, spec_of

STAGES = 2
ROUNDS = 3
ROLES = [Role.REPLICA, Role.REPLICA, Role.STAGE, Role.STAGE, Role.STAGE]
PEERS = [keyed(i) for i in range(len(ROLES))]
who = st.sampled_from(PEERS)
few = st.sampled_from([set(), set(), set(), *({peer} for peer in PEERS), set(PEERS[:2]), set(PEERS[1:])])
stages = st.integers(0, STAGES - 1)
shifts = st.sampled_from([0] * 8 + [-1, 1])


class RandomRun(RuleBasedStateMachine):
    """Two full replicas and a pipeline of two, with honest, late, absent and confused peers."""

    payloads = Bundle("payloads")

    @initialize(target=payloads, gathered=st.sampled_from([True] * 4 + [False]))
    def begin(self, gathered: bool) -> object:
        self.run = Run(spec_of(STAGES, replicas=2, pipelines=1, rounds=ROUNDS))
        self.run.does(Start())
        self.decisions: dict[tuple[int, int], Decision] = {}
        self.held: dict[tuple[int, int], dict[PeerId, set[PeerId]]] = defaultdict(lambda: defaultdict(set))
        if gathered:
            for peer, role in list(zip(PEERS, ROLES, strict=True))[:4]:
                self.run.does(peer.join(self.run.spec, role))
        return multiple()

    @property
    def number(self) -> int:
        return self.run.state.current_round

    @rule(i=st.integers(0, len(PEERS) - 1), role=st.sampled_from(Role), endpoint=st.sampled_from(["", "h:1"]))
    def join(self, i: int, role: Role, endpoint: str) -> None:
        self.run.send(PEERS[i].join(self.run.spec, role, endpoint))

    @rule(peer=who, ban=st.sampled_from([False] * 3 + [True]))
    def ban_or_unban(self, peer: Keyed, ban: bool) -> None:
        self.run.does(Ban(peer.peer, "a test") if ban else Unban(peer.peer))

    @invariant()
    def nobody_banned_takes_part(self) -> None:
        state = self.run.state
        assert not any(state.peers[peer].is_live for peer in state.banned if peer in state.peers)

    @precondition(lambda self: self.run.state.phase is not Phase.GATHERING)
    @rule(
        target=payloads, peer=who, stage=stages, shift=shifts, anchor=st.sampled_from([None] * 6 + ["other"])
    )
    def offer(self, peer: Keyed, stage: int, shift: int, anchor: str | None) -> PayloadDescriptor:
        payload = peer.payload(self.run.spec, stage, max(1, self.number + shift), anchor)
        self.run.send(Offer(peer.peer, payload))
        return payload

    @rule(peer=who, held=st.lists(payloads, max_size=4), stage=stages)
    def report(self, peer: Keyed, held: list[PayloadDescriptor], stage: int) -> None:
        number = held[0].round if held else self.number
        self._report(peer, held[0].stage if held else stage, number, tuple(held))

    def _report(self, peer: Keyed, stage: int, number: int, held: tuple[PayloadDescriptor, ...]) -> None:
        if self.run.send(Report(peer.peer, stage, number, held)).refusal is None:
            # A report after the decision is counted here too: decisions were checked when they were made.
            self.held[stage, number][peer.peer] |= {d.owner for d in held}

    def _hosts(self, stage: int, absent: set[Keyed]) -> list[Keyed]:
        seats = [(peer, self.run.state.seat(peer.peer, self.number)) for peer in PEERS]
        return [p for p, seat in seats if seat and stage in seat.member.stages and p not in absent]

    @precondition(lambda self: 1 <= self.number <= ROUNDS)
    @rule(stage=stages, absent=few, good=st.integers(0, 5))
    def hosts_offer(self, stage: int, absent: set[Keyed], good: int) -> None:
        """Without this and the next two, random steps would rarely get a run anywhere."""
        number = self.number
        for peer in self._hosts(stage, absent):
            anchor = None if good else f"of {peer.number}"
            self.run.send(Offer(peer.peer, peer.payload(self.run.spec, stage, number, anchor)))

    @precondition(lambda self: 1 <= self.number <= ROUNDS)
    @rule(stage=stages, absent=few, lacked=few)
    def hosts_report(self, stage: int, absent: set[Keyed], lacked: set[Keyed]) -> None:
        number = self.number
        group = self.run.state.round(stage, number).group
        lacked_ids = {peer.peer for peer in lacked}
        for peer in self._hosts(stage, absent) if group else []:
            held = tuple(d for d in group.descriptors if d.owner == peer.peer or d.owner not in lacked_ids)
            self._report(peer, stage, number, held)

    @precondition(lambda self: self.number > 0)
    @rule(peer=who, stage=stages, shift=shifts)
    def await_decision(self, peer: Keyed, stage: int, shift: int) -> None:
        self.run.send(Await(peer.peer, stage, max(1, self.number + shift)))

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

    @rule(dead=few, seconds=st.sampled_from([0.2, 14.0, 60.0, 125.0]))
    def time_passes(self, dead: set[Keyed], seconds: float) -> None:
        self.run.now += seconds
        for peer in PEERS:
            if peer not in dead:
                self.run.send(Heartbeat(peer.peer, self.number, 0))
        self.run.does(Tick())

    @rule()
    def the_coordinator_restarts(self) -> None:
        stored = [encode(event) for event in self.run.events if not isinstance(event, PeerSeen)]
        state = replay(State(STAGES), (decode(kind, text) for kind, text in stored))
        assert state == self.run.state
        self.run.state = state
        self.run.does(Start())

    @invariant()
    def decisions_are_single_and_final(self) -> None:
        found = [e.decision for e in self.run.events if isinstance(e, RoundCommitted | RoundAborted)]
        by_key = {(decision.stage, decision.round): decision for decision in found}
        assert len(by_key) == len(found)
        assert by_key == self.run.state.decisions
        for key, decision in self.decisions.items():
            assert by_key[key] == decision
        for key in by_key.keys() - self.decisions.keys():
            self._is_founded(by_key[key])
        self.decisions = by_key

    def _is_founded(self, decision: Decision) -> None:
        """Checked once, in the state right after the decision."""
        state, number = self.run.state, decision.round
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
            seat = state.seat(entry.descriptor.owner, number)
            assert seat is not None
            assert decision.stage in seat.member.stages
            assert len(entry.holders) >= need
            for holder in entry.holders:
                assert entry.descriptor.owner in self.held[decision.stage, number][holder]
        epochs = {d.next_epoch for d in state.decisions.values() if d.round == number}
        assert epochs == {state.plan_for(number + 1).epoch}

    @invariant()
    def plans_follow_one_another(self) -> None:
        plans = self.run.state.plans
        assert [plan.epoch for plan in plans] == list(range(1, len(plans) + 1))
        assert all(a.from_round < b.from_round for a, b in pairwise(plans))
        assert plans == tuple(e.plan for e in self.run.events if isinstance(e, PlanAdopted))

    @invariant()
    def sample_ranges_tile(self) -> None:
        state, size = self.run.state, self.run.spec.samples_per_round
        ranges = [
            sample_range(plan, size, number, replica.index)
            for number in range(1, state.current_round + 1)
            for plan in [state.plan_for(number)]
            for replica in plan.replicas
        ]
        stops = [0, *(part.stop for part in ranges)]
        assert [part.start for part in ranges] == stops[:-1]

    @invariant()
    def there_is_always_a_sentence(self) -> None:
        assert sentence(self.run.state, self.run.spec)

    @invariant()
    def a_finished_run_has_decided_everything(self) -> None:
        if self.run.state.phase is Phase.FINISHED:
            assert len(self.run.state.decisions) == STAGES * self.run.spec.rounds


TestRandomRuns = RandomRun.TestCase
TestRandomRuns.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
