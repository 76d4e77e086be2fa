"""A replay finds the places where this version decides otherwise, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from coordinator.ops.incident.file import Incident
from coordinator.ops.incident.redaction import redacted_log, redacted_spec
from coordinator.run import decide as decide_module
from coordinator.run.rounds import rounds
from coordinator.run.state import commands, events
from coordinator.run.state.events import Event
from coordinator.run.state.transaction import Step
from protocol.types import Finding, PausedBy, PayloadDescriptor, Rejection, Role, Verdict
from tests.builders import anchor_of, keyed, spec_of
from tests.support import incident_replay as replay_module
from tests.support.coordinator_run import (
    Run,
    attest,
    beat_for,
    measure,
    offer,
    pass_time,
    play_round,
    started,
)
from tests.support.incident_replay import Replay, replay_incident

A, B, C, D = map(keyed, range(4))
ARBITER = keyed(50)


def recorded(run: Run) -> Incident:
    log = [event for event in run.events if not isinstance(event, events.PeerSeen)]
    return Incident(redacted_spec(run.spec), redacted_log(log))


def eventful() -> Run:
    """A run in which much goes wrong: losses, strikes, rejections, divergence, restarts, a ban."""
    spec = spec_of(2, 3, 0, 12)
    run = Run(spec)

    def act(command: Any) -> None:
        run.now += 0.25
        run.send(command)

    act(commands.Start())
    act(commands.AppointArbiter(ARBITER.peer))
    act(commands.CreateInvite("i", "ab" * 32, 3, 0.3, None))
    for peer in (A, B, C):
        act(peer.join(spec))
    play(run)
    act(commands.Offer(A.peer, PayloadDescriptor("other", 0, 2, A.peer, "", "", 1.0, 1, "")))
    act(commands.Offer(A.peer, replace(A.payload(spec, 0, 2), nbytes=0)))  # a strike
    play(run)
    # C is lost and comes back.
    beat_for(run, spec.timing.lost_after + 1, A, B)
    play(run, (A, B))
    act(C.join(spec))
    attest(run, C)
    play(run, (A, B))
    # A payload that two reject.
    number = run.state.current_round
    payloads = [peer.payload(spec, 0, number, weight=1.0) for peer in (A, B, C)]
    for peer, payload in zip((A, B, C), payloads, strict=True):
        run.now += 1.0
        offer(run, peer, payload)
    bad = Rejection(payloads[2], "its numbers are not finite")
    act(commands.Report(C.peer, 0, number, tuple(payloads)))
    act(commands.Report(A.peer, 0, number, tuple(payloads[:2]), (bad,)))
    act(commands.Report(B.peer, 0, number, tuple(payloads[:2]), (bad,)))
    contest = run.state.round_of(0, number).contest
    if contest is not None:
        for owner in contest.open_owners:
            act(commands.Arbitrate(0, number, owner, Verdict(Finding.INVALID, "not finite")))
    pass_time(run, 20.0, A, B, C, step=0.25)
    act(commands.Attest(B.peer, 1, number - 1, "stage", "f" * 64))
    act(commands.Start())
    measure(run, A, 1e9, 1e7)
    pass_time(run, 30.0, A, B, C, step=0.25)
    act(commands.PauseRun(PausedBy.OPERATOR, "a look at the loss"))
    pass_time(run, 10.0, A, B, C, step=0.25)
    act(commands.ResumeRun())
    act(commands.Unname(A.peer))
    act(commands.Ban(B.peer, "a test"))
    act(commands.Unban(B.peer))
    act(commands.Drain(C.peer, "asked to leave"))
    act(commands.Leave(A.peer, "interrupted"))
    return run


def play(run: Run, peers: tuple[Any, ...] = (A, B, C)) -> None:
    """One round, in which every command has a time of its own."""
    number, spec = run.state.current_round, run.spec
    for stage in range(2):
        weights = {p.peer: run.state.assignment(p.peer, number) for p in peers}
        hosts = [peer for peer in peers if weights[peer.peer] and run.state.takes_part(peer.peer, number)]
        payloads = tuple(
            peer.payload(
                spec,
                stage,
                number,
                weight=weights[peer.peer].replica.weight,
                epoch=run.state.plan_for(number).epoch,
            )  # type: ignore[union-attr]
            for peer in hosts
        )
        for peer, payload in zip(hosts, payloads, strict=True):
            run.now += 0.5
            offer(run, peer, payload)
        for peer in hosts:
            run.now += 0.25
            run.accept(commands.Report(peer.peer, stage, number, payloads))
    for stage in range(2):
        for peer in peers:
            if run.state.reservations.get(peer.peer):
                run.now += 0.25
                run.send(commands.Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))


@cache
def incident() -> Incident:
    return recorded(eventful())


@cache
def played() -> Replay:
    return replay_incident(incident())


def test_this_version_decides_its_own_log_alike() -> None:
    kinds = {type(event) for event in incident().events}
    assert {events.PeerLost, events.PayloadRejected, events.PeerStruck, events.RoundDecided} <= kinds
    assert played().differences == ()
    assert played().broken == ""
    assert len(played().log) == len(incident().events)
    struck = sum(isinstance(event, events.PeerStruck) for event in incident().events)
    assert 0 < played().given <= struck, "only events of refused calls are taken as given"
    assert played().decided + played().given == len(incident().events)
    (first, *_) = (event for event in played().log if isinstance(event, events.PlanAdopted))
    assert "3 full replicas" in first.plan.reason, "which was left out of the file"


def changed_rule(monkeypatch: pytest.MonkeyPatch, change: Callable[[Event], Event | None]) -> Replay:
    """The replay with a version whose events `change` maps; None leaves one out."""
    original = decide_module.decide

    def decide(state: Any, command: Any, now: float) -> Any:
        outcome = original(state, command, now)
        changed = ((step, change(step.event)) for step in outcome.steps)
        steps = tuple(Step(each, step.before, step.after) for step, each in changed if each is not None)
        return replace(outcome, steps=steps)

    monkeypatch.setattr(replay_module, "decide", decide)
    return replay_incident(incident())


def test_a_version_that_decides_otherwise_is_named_with_the_first_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(event: Event) -> Event | None:
        if isinstance(event, events.GroupClosed) and event.round_number == 3:
            return replace(event, seconds=event.seconds + 1)
        return event

    found = changed_rule(monkeypatch, change)
    closed = [
        number
        for number, event in enumerate(incident().events, start=1)
        if isinstance(event, events.GroupClosed) and event.round_number == 3
    ]
    assert len(found.differences) == len(closed) > 0  # one difference does not cause others
    (first, *_) = found.differences
    assert first.number <= closed[0] < first.number + len(first.recorded)
    assert isinstance(first.command, commands.Offer)
    assert found.broken == ""


def test_a_version_that_decides_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = changed_rule(monkeypatch, lambda e: None if isinstance(e, events.PeerLost) else e)
    assert any(isinstance(each.recorded[0], events.PeerLost) for each in found.differences)


def test_a_version_that_decides_earlier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(2, rounds=4, timing__lost_after=60.0)
    run.now += 1.0
    offer(run, A, A.payload(run.spec, 0, 1))
    pass_time(run, 200.0, A, B, step=2.0)
    log = recorded(run)
    assert replay_incident(log).is_equal
    monkeypatch.setattr(rounds, "closes_at", lambda state: state.opened_at and state.opened_at + 1.0)
    (first, *_) = replay_incident(log).differences
    assert isinstance(first.command, commands.Tick)
    assert any(isinstance(event, events.GroupClosed) for event in first.decided)


def test_an_invariant_that_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list(incident().events)
    place = next(n for n, event in enumerate(log) if isinstance(event, events.RoundDecided))
    wrong = log[place]
    assert isinstance(wrong, events.RoundDecided)
    decision = replace(wrong.decision, next_epoch=1, entries=wrong.decision.entries[:1])
    log[place] = events.RoundDecided(wrong.at, decision)
    found = replay_incident(replace(incident(), events=tuple(log)))
    assert [each.number <= place + 1 <= each.number + len(each.recorded) for each in found.differences] == [
        True
    ]
    assert f"round {decision.round_number} of stage {decision.stage}" in found.broken


def test_a_pipeline_with_spares_and_roles_that_the_coordinator_chooses_replays() -> None:
    run = Run(spec_of(2, 1, 1, 4))
    run.accept(commands.Start())
    for number in range(5):
        run.now += 0.5
        join = keyed(number).join(run.spec)
        run.send(replace(join, role=None if number else Role.REPLICA))
    run.now += 1.0
    play_round(run)
    beat_for(run, 20.0, *map(keyed, range(4)))
    assert replay_incident(recorded(run)).differences == ()


def test_a_rollback_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(spec_of(2, 3, 0, 12, recovery__checkpoint_every=1))
    peers = (A, B, C)

    def act(command: Any) -> None:
        run.now += 0.25
        run.accept(command)

    def attest_embedding(number: int) -> None:
        for peer in peers:
            act(commands.Attest(peer.peer, 0, number, "embedding", f"{number:064x}"))

    act(commands.Start())
    for peer in peers:
        act(peer.join(run.spec))
    for peer in peers:
        attest(run, peer)
    for number in range(1, 4):
        play(run)
        attest_embedding(number)
    for peer in peers:
        act(commands.Heartbeat(peer.peer, 1, 0, kept=(2,)))
    act(commands.RollBack(2, "the loss has risen"))
    for stage in range(2):
        for peer in peers:
            act(commands.Attest(peer.peer, stage, 4, "stage", anchor_of(stage, 2)))
    act(commands.ResumeRun())
    pass_time(run, 30.0, *peers, step=0.25)
    assert run.state.restored == {4: 2}
    assert replay_incident(recorded(run)).differences == ()
    # A version that refuses it is found.
    monkeypatch.setattr("coordinator.rollback.problem_of", lambda *_: "a test")
    assert replay_incident(recorded(run)).differences


def test_what_peers_hold_after_rounds_that_an_older_copy_lacks_replays() -> None:
    run = Run(spec_of(2, 3, 0, 12, recovery__checkpoint_every=1))
    peers = (A, B, C)
    run.accept(commands.Start())
    for peer in peers:
        run.now += 0.25
        run.accept(peer.join(run.spec))
    for peer in peers:
        attest(run, peer)
    play(run)
    for number, hosts in ((6, peers), (7, (A,))):
        for peer in hosts:
            for stage, part in ((0, "stage"), (1, "stage"), (0, "embedding")):
                run.send(commands.Attest(peer.peer, stage, number, part, anchor_of(stage, number)))
    run.now += 0.25
    run.accept(commands.RollBack(6, "the copy was old"))
    pass_time(run, 30.0, *peers, step=0.25)
    assert run.state.restored == {8: 6}
    assert replay_incident(recorded(run)).differences == ()
