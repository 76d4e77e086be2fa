"""Random runs of the coordinator, with peers that are honest, late, absent or confused.

Decisions are single, final and justified; no plan includes a peer that has not caught up; when all peers
behave, the run continues; and everything is explained within bounds.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, precondition, rule

from coordinator.membership.ahead import digest_ahead, told_ahead
from coordinator.placement.rules import filled_replicas
from coordinator.rollback import problem_of
from coordinator.run.rounds.attestation import expected_digest, settled_digest
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import (
    AppointArbiter,
    Arbitrate,
    Attest,
    Await,
    Ban,
    Drain,
    Heartbeat,
    Leave,
    Offer,
    PauseRun,
    Report,
    ResumeRun,
    Retreat,
    RollBack,
    Start,
    Tick,
    Unban,
)
from coordinator.run.state.events import PayloadWithheld, PeerSeen
from coordinator.run.state.state import State
from coordinator.store.event_codec import decode, encode
from protocol.status import RunPhase
from protocol.types import Decision, Finding, Part, PausedBy, PayloadDescriptor, Role, Verdict
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.checked_run import ARBITER, STAGES, CheckedMachine, CheckedRun
from tests.support.coordinator_run import measure
from tests.support.examples import examples
from tests.support.history import check_history

ROUNDS = 6
ROLES = [*[Role.REPLICA] * 2, *[Role.STAGE] * 6]
PEERS = [keyed(i) for i in range(len(ROLES))]
TIGHT = 1_550_000
"""Bytes of memory that hold the last stage and not the first."""
peers = st.sampled_from(PEERS)
few = st.sampled_from([set(), set(), set(), *({peer} for peer in PEERS), set(PEERS[:2]), set(PEERS[1:])])
stages = st.integers(0, STAGES - 1)
shifts = st.sampled_from([0] * 8 + [-1, 1])


class RandomRun(CheckedMachine):
    """Two full replicas, a pipeline of two and stage peers beyond, honest, late, absent and confused."""

    payloads = Bundle("payloads")

    @initialize(
        target=payloads,
        gathered=st.sampled_from([True] * 4 + [False]),
        spares=st.integers(0, 2),
        arbitrated=st.booleans(),
        turns=st.sampled_from([1, 1, 2]),
    )
    def begin(self, gathered: bool, spares: int, arbitrated: bool, turns: int) -> object:
        options = {"grouping__spares": spares, "inner__microbatches": 3}
        options |= {"outer__turns": turns, "outer__overlap": turns - 1}
        links = {"link__least_k": 2, "link__most_k": 16, "link__uncompressed": True}
        self.run = CheckedRun(spec_of(STAGES, 2, 1, ROUNDS, **options, **links))
        self.run.accept(Start())
        if arbitrated:
            self.run.accept(AppointArbiter(ARBITER.peer))
        self.restarts: list[int] = []
        self.decisions: dict[tuple[int, int], Decision] = {}
        if gathered:
            for peer, role in list(zip(PEERS, ROLES, strict=True))[:4]:
                self.run.accept(peer.join(self.run.spec, role))
        return multiple()

    @property
    def number(self) -> int:
        return self.run.state.current_round

    @rule(
        i=st.integers(0, len(PEERS) - 1),
        role=st.sampled_from([None, *Role]),
        endpoint=st.sampled_from(["", "h:1"]),
        memory_bytes=st.sampled_from([0, 1000, TIGHT, 2**30, 2**30]),
    )
    def join(self, i: int, role: Role | None, endpoint: str, memory_bytes: int) -> None:
        bound = PEERS[i].join(self.run.spec, endpoint=endpoint, memory_bytes=memory_bytes)
        self.run.send(replace(bound, role=role))

    @rule(peer=peers, ban=st.sampled_from([False] * 3 + [True]))
    def ban_or_unban(self, peer: Keyed, ban: bool) -> None:
        self.run.accept(Ban(peer.peer, "a test") if ban else Unban(peer.peer))

    @precondition(lambda self: self.run.state.phase is not RunPhase.GATHERING)
    @rule(
        target=payloads,
        peer=peers,
        stage=stages,
        shift=shifts,
        anchor=st.sampled_from([None] * 6 + ["other"]),
    )
    def offer(self, peer: Keyed, stage: int, shift: int, anchor: str | None) -> PayloadDescriptor:
        payload = peer.payload(self.run.spec, stage, max(1, self.number + shift), anchor)
        self.run.send(Offer(peer.peer, payload))
        return payload

    @rule(peer=peers, held=st.lists(payloads, max_size=4), stage=stages)
    def report(self, peer: Keyed, held: list[PayloadDescriptor], stage: int) -> None:
        number = held[0].round_number if held else self.number
        self.run.send(Report(peer.peer, held[0].stage if held else stage, number, tuple(held)))

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
            anchor = self._anchor(stage, number - 1) if good else f"of {peer.number}"
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
            self.run.send(Report(peer.peer, stage, number, held))

    @precondition(lambda self: self.run.state.arbiter is not None and 1 <= self.number <= ROUNDS)
    @rule(stage=stages, finding=st.sampled_from(Finding), refuted=few)
    def the_arbiter_answers(self, stage: int, finding: Finding, refuted: set[Keyed]) -> None:
        contest = self.run.state.round_of(stage, self.number).contest
        if contest is not None and contest.open_owners:
            verdict = Verdict(finding, "a test", tuple(peer.peer for peer in refuted))
            self.run.accept(Arbitrate(stage, self.number, contest.open_owners[0], verdict))

    @precondition(lambda self: self.number > 0)
    @rule(peer=peers, stage=stages, shift=shifts, withholds=st.booleans())
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
            self.the_invariants_of_every_run_hold()
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
            self.run.send(Attest(peer.peer, stage, number, "stage", self._anchor(stage, number)))

    @rule(
        peer=peers,
        stage=stages,
        shift=shifts,
        part=st.sampled_from(["stage", "embedding"]),
        good=st.booleans(),
    )
    def attest(self, peer: Keyed, stage: int, shift: int, part: str, good: bool) -> None:
        number = max(0, self.number - 1 + shift)
        self.run.send(Attest(peer.peer, stage, number, part, anchor_of(stage, number) if good else "other"))

    @rule(peer=peers, reason=st.sampled_from(["finished", "interrupted"]), sure=st.integers(0, 5))
    def leave(self, peer: Keyed, reason: str, sure: int) -> None:
        if sure == 0:
            self.run.send(Leave(peer.peer, reason))

    @rule(peer=peers, sure=st.integers(0, 2))
    def drain(self, peer: Keyed, sure: int) -> None:
        if sure == 0:
            self.run.send(Drain(peer.peer, "a test"))

    @rule(
        peer=peers,
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
    @rule(peer=peers, older=st.sampled_from([0, 0, 1]), steps=st.sampled_from([None, 0, 1]))
    def retreat(self, peer: Keyed, older: int, steps: int | None = None) -> None:
        self.run.send(Retreat(peer.peer, self.run.state.epoch - older, "a test", self.number, steps))

    @precondition(lambda self: 1 <= self.number <= ROUNDS)
    @rule(dead=few, steps=st.sampled_from([0, 1]))
    def chains_break(self, dead: set[Keyed], steps: int) -> None:
        """Some peers are silent, members of pipelines tell of it, and a repair takes seats if it can."""
        for peer, role in zip(PEERS, ROLES, strict=True):
            if role is Role.STAGE and peer not in dead:
                self.retreat(peer, 0, steps)
        self.run.now += 4 * self.run.spec.timing.heartbeat
        for peer in PEERS:
            if peer not in dead:
                self.run.send(Heartbeat(peer.peer, self.number, 0))
        self.run.accept(Tick())

    @precondition(lambda self: self.number > 0)
    @rule(peer=peers)
    def dies_and_comes_back(self, peer: Keyed) -> None:
        """With an empty disk, or with all that it had: what it attests tells."""
        self.run.now += 2 * self.run.spec.timing.heartbeat + 1
        for other in PEERS:
            if other is not peer:
                self.run.send(Heartbeat(other.peer, self.number, 0))
        self.run.send(peer.join(self.run.spec, ROLES[peer.number]))

    @precondition(lambda self: self.number > 0)
    @rule(peer=peers, behind=st.sampled_from([0, 0, 0, 1, 2]))
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
        self.run.accept(ResumeRun())
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
            self.the_invariants_of_every_run_hold()
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

    @precondition(lambda self: self.run.state.phase is not RunPhase.FINISHED)
    @rule(sure=st.integers(0, 4))
    def the_run_is_paused(self, sure: int) -> None:
        if sure == 0:
            self.run.accept(PauseRun(PausedBy.ALARM, "a test"))

    @precondition(lambda self: self.number > 0)
    @rule(restore_round=st.integers(0, ROUNDS), kept=st.sampled_from([(), range(ROUNDS), range(ROUNDS)]))
    def the_run_is_rolled_back(self, restore_round: int, kept: range) -> None:
        """Refused without a change, or decided for all stages at once; the run is held then."""
        for peer in PEERS:
            self._follow(peer, restore_round)
            self.run.send(Heartbeat(peer.peer, self.number, 0, kept=tuple(kept)))
        before, former, found = self.run.state, self.number, problem_of(self.run.state, restore_round)
        outcome = self.run.send(RollBack(restore_round, "a test"))
        if outcome.refusal is not None:
            assert self.run.state is before
            return
        assert not found
        number, is_ahead = max(self.run.state.restored), restore_round >= former
        # An adopted round comes after all rounds that live peers know, which the restored one need not be.
        newest = max(told_ahead(before, ROUNDS), default=0)
        assert number == min(newest + 1, ROUNDS) if is_ahead else number in (former, former + 1)
        assert self.number == number + 1
        assert is_ahead or self.run.state.is_held or number == ROUNDS
        for stage in range(STAGES):
            assert all(self.run.state.is_decided(*key) for key in before.decisions)
            digest_of = digest_ahead if is_ahead else settled_digest
            expected = digest_of(before, stage, restore_round, Part.STAGE)
            assert settled_digest(self.run.state, stage, number, "stage") == expected

    @rule()
    def the_run_is_resumed(self) -> None:
        self.run.accept(ResumeRun())

    @rule(dead=few, seconds=st.sampled_from([0.2, 14.0, 60.0, 125.0]))
    def time_passes(self, dead: set[Keyed], seconds: float) -> None:
        self.run.now += seconds
        for peer in PEERS:
            if peer not in dead:
                self.run.send(Heartbeat(peer.peer, self.number, 0))
        self.run.accept(Tick())

    @rule()
    def the_coordinator_restarts(self) -> None:
        """From its log."""
        texts = [encode(event) for event in self.run.events if not isinstance(event, PeerSeen)]
        stored = [decode(kind, text) for kind, text in texts]
        state = replay(State(self.run.spec, self.run.spec.name), stored)
        assert state == self.run.state
        self.run.state = state
        self.restarts.append(len(stored))
        self.run.accept(Start())

    def teardown(self) -> None:
        """The history of the run, killed at each restart, has the credit that its events justify.

        Every question about the run has an answer.
        """
        if hasattr(self, "run"):
            check_history(self.run, self.restarts)
            if find_spec("coordinator.ops.explain"):  # a leaf
                from tests.support.explaining import Asked, check_all_answers  # noqa: PLC0415

                check_all_answers(self.run.state, Asked(self.run.state, self.run.events, self.run.now + 3.0))


TestRandomRuns = RandomRun.TestCase
TestRandomRuns.settings = settings(
    max_examples=examples(gate=25, search=60), stateful_step_count=40, deadline=None
)


def test_the_last_decision_under_a_plan_is_checked_by_who_was_absent_then() -> None:
    """A new plan follows at once, and the state forgets the absent members of the one before."""
    machine = RandomRun()
    machine.begin(gathered=True, spares=0, arbitrated=False, turns=1)
    machine.hosts_offer(absent=set(), good=0, stage=0)
    machine.retreat(older=0, peer=PEERS[0])
    machine.a_round_goes_well(absent={*PEERS[:2]})
    state = machine.run.state
    assert len(state.plans) == 2
    assert len(state.decisions[1, 1].entries) == len(state.decisions[1, 1].entries[0].holders) == 1
    machine.the_invariants_of_every_run_hold()
