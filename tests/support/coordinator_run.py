"""A coordinator's run without IO: a test sends commands, and time moves only when the test moves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.placement.phases import earliest
from coordinator.run.decide import Applied, decide
from coordinator.run.state.apply import apply
from coordinator.run.state.commands import (
    Attest,
    Command,
    Drain,
    Heartbeat,
    Leave,
    Offer,
    Report,
    Start,
    Tick,
)
from coordinator.run.state.events import Event, PeerMeasured
from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.sampling import sample_range
from protocol.math.turns import is_due
from protocol.spec.run import RunSpec
from protocol.status import Cause, CauseCode, RunPhase
from protocol.types import Decision, Estimates, PayloadDescriptor, Role
from tests.builders import Keyed, anchor_of, keyed, spec_of

ALL = [keyed(i) for i in range(12)]


class Run:
    """A coordinator without IO: it applies and keeps events, and the test sets the time."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.state = State(spec, spec.name)
        self.events: list[Event] = []
        self.steps: list[tuple[Event, State, State]] = []  # each event with the state before and after it
        self.now = 1000.0

    def send(self, command: Command) -> Applied:
        outcome = decide(self.state, command, self.now)
        for event in outcome.events:
            self.apply(event)
        return outcome

    def apply(self, event: Event) -> None:
        before, self.state = self.state, apply(self.state, event)
        self.events.append(event)
        self.steps.append((event, before, self.state))

    def accept(self, command: Command) -> tuple[Event, ...]:
        """The events of a command that must not be refused."""
        outcome = self.send(command)
        assert outcome.refusal is None, outcome.refusal
        return outcome.events

    def refuse(self, command: Command, code: ErrorCode) -> HetnodeError:
        """The refusal of a command, which must not change the state except for strikes and divergence."""
        before = self.state
        refusal = self.send(command).refusal
        assert refusal is not None, command
        assert refusal.code is code
        unstruck = replace(self.state, strikes=before.strikes)
        assert unstruck == before or code is ErrorCode.ANCHOR_DIVERGED
        return refusal


def codes_of(cause: Cause | None) -> list[CauseCode]:
    """The codes of a cause and of those that it follows from, the innermost last."""
    if cause is None:
        return []
    return [cause.code, *(code for each in cause.causes for code in codes_of(each))]


def started(
    replicas: int = 2, pipelines: int = 0, stages: int = 2, rounds: int = 40, **overrides: Any
) -> Run:
    """As many peers as the run takes, full replicas first. `overrides` as "section__field"."""
    spec = spec_of(stages, replicas, pipelines, rounds, **overrides)
    run = Run(spec)
    run.accept(Start())
    for i in range(replicas + pipelines * stages):
        run.accept(keyed(i).join(spec, Role.REPLICA if i < replicas else Role.STAGE))
    assert run.state.phase is RunPhase.TRAINING
    return run


def attest(run: Run, peer: Keyed, number: int | None = None) -> None:
    """`peer` follows up to `number`: it attests that anchor of every stage of its place."""
    number = run.state.current_round - 1 if number is None else number
    for stage in run.state.reservations[peer.peer].stages:
        run.accept(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))


def offer(run: Run, peer: Keyed, payload: PayloadDescriptor) -> None:
    """Offer as a node does: as soon as the coordinator believes that so much can have been trained."""
    run.now = max(run.now, earliest(run.state, payload))
    run.accept(Offer(peer.peer, payload))


def play_round(run: Run, followers: tuple[Keyed, ...] = (), done: Mapping[int, float] | None = None) -> None:
    """All assigned peers offer, hold, report and attest; `followers` attest.

    `done`: by replica, the finished share of the H steps of its members; 1 by default.
    """
    number = run.state.current_round
    stages = range(run.spec.swarm.stages)
    for stage in sorted(stages, key=lambda stage: not is_due(run.spec, stage, number)):
        play_stage(run, stage, done, number)
    for peer in followers:
        attest(run, peer, number)
    assert run.state.current_round == number + 1


def play_stage(
    run: Run, stage: int, done: Mapping[int, float] | None = None, number: int | None = None
) -> None:
    """As :func:`play_round`, of one stage of round `number`. The round ends with the last of them.

    Of a stage without a turn there are attestations alone.
    """
    number = run.state.current_round if number is None else number
    by_peer = {keyed(i).peer: keyed(i) for i in range(40)}
    hosts = [
        by_peer[peer]
        for peer, assignment in run.state.assignments[run.state.plan_for(number).epoch].items()
        if run.state.takes_part(peer, number) and run.state.peers[peer].is_live
        if stage in assignment.member.stages
    ]
    payloads = tuple(
        peer.payload(run.spec, stage, number, weight=replica.weight * (done or {}).get(replica.index, 1.0))
        for peer in hosts
        for replica in [run.state.assignment(peer.peer, number).replica]
    )
    if is_due(run.spec, stage, number):
        for peer, payload in zip(hosts, payloads, strict=True):
            offer(run, peer, payload)
        for peer in hosts:
            run.accept(Report(peer.peer, stage, number, payloads))
    for peer in hosts:
        run.accept(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))


def members_by_replica(run: Run, number: int | None = None) -> dict[int, list[str]]:
    plan = run.state.plan_for(run.state.current_round if number is None else number)
    return {replica.index: [member.peer for member in replica.members] for replica in plan.replicas}


def leave(run: Run, *peers: Keyed) -> None:
    for peer in peers:
        run.accept(Leave(peer.peer, "interrupted"))


def drain(run: Run, peer: Keyed) -> None:
    run.accept(Drain(peer.peer, "a test"))


def pass_time(run: Run, seconds: float, *alive: Keyed, step: float = 5.0) -> None:
    """Let time pass; every `step` seconds the peers `alive` send heartbeats and the coordinator ticks."""
    end = run.now + seconds
    while run.now < end:
        run.now = min(end, run.now + step)
        for peer in alive:
            run.accept(Heartbeat(peer.peer, 1, 0))
        run.accept(Tick())


def measure(
    run: Run,
    peer: Keyed,
    flops: float = 0.0,
    bandwidth: float = 0.0,
    microbatch_seconds: float = 0.0,
) -> None:
    """`peer` tells what it can do: FLOP/s, bytes/s both ways, seconds of a microbatch of its replica."""
    capacity = replace(run.state.peers[peer.peer].capacity, flops=flops, uplink=bandwidth, downlink=bandwidth)
    run.apply(PeerMeasured(run.now, peer.peer, Estimates(capacity, microbatch_seconds)))


def started_and_attested(replicas: int = 2, pipelines: int = 0, **more: Any) -> Run:
    """As `started`; the members have attested what they start from."""
    run = started(replicas, pipelines, **more)
    for peer in ALL:
        if peer.peer in run.state.reservations:
            attest(run, peer)
    return run


def play_rounds(run: Run, count: int = 1, asleep: tuple[Keyed, ...] = ()) -> None:
    """All peers with a reservation train or follow, except those `asleep`."""
    for _ in range(count):
        number = run.state.current_round
        play_round(run, tuple(peer for peer in ALL if _follows(run, peer, number) and peer not in asleep))


def _follows(run: Run, peer: Keyed, number: int) -> bool:
    known = run.state.peers.get(peer.peer)
    has_place = known is not None and known.is_staying and peer.peer in run.state.reservations
    return has_place and not run.state.takes_part(peer.peer, number)


def join(run: Run, *peers: Keyed, **more: Any) -> None:
    for peer in peers:
        run.accept(peer.join(run.spec, Role.STAGE, **more))
        attest(run, peer)


def latest_reason(run: Run) -> str:
    return run.state.plans[-1].reason


def slot_of(run: Run, peer: Keyed) -> tuple[int, int]:
    """Replica and position."""
    kept = run.state.reservations[peer.peer]
    return kept.replica, kept.position


def joined_run(spec: RunSpec, *roles: Role) -> Run:
    """A run in which the first keyed peers have joined in these roles."""
    run = Run(spec)
    run.accept(Start())
    for i, role in enumerate(roles):
        run.accept(keyed(i).join(spec, role))
    return run


def settle(run: Run, stage: int, round_number: int, hosts: Sequence[Keyed]) -> Decision:
    """All `hosts` offer, hold all payloads, report and attest. Returns the decision."""
    payloads = [host.payload(run.spec, stage, round_number) for host in hosts]
    for host, payload in zip(hosts, payloads, strict=True):
        run.accept(Offer(host.peer, payload))
    for host in hosts:
        run.accept(Report(host.peer, stage, round_number, tuple(payloads)))
    for host in hosts:
        run.accept(Attest(host.peer, stage, round_number, "stage", anchor_of(stage, round_number)))
    return run.state.decisions[stage, round_number]


def beat_for(run: Run, seconds: float, *peers: Keyed) -> None:
    """Let time pass while `peers` send as many heartbeats as keep them alive."""
    pass_time(run, seconds, *peers, step=run.spec.timing.lost_after / 2)


def assert_samples_tile(run: Run, rounds: int) -> None:
    """Each sample of rounds 1 to `rounds` belongs to exactly one replica, in order, over all plans."""
    stop = 0
    for number in range(1, rounds + 1):
        plan = run.state.plan_for(number)
        for replica in plan.replicas:
            samples = sample_range(plan, run.spec, number, replica.index)
            assert samples.start == stop
            stop = samples.stop
