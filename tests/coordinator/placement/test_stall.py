"""A run without a complete replica waits, and goes on when one is complete again."""

from __future__ import annotations

import pytest

from coordinator.run.rounds.rounds import MOST_RESTART_SECONDS
from coordinator.run.state.commands import (
    Attest,
    Await,
    Heartbeat,
    Leave,
    Offer,
    Report,
    Retreat,
    Start,
    Tick,
)
from coordinator.run.state.events import PayloadWithheld, PlanAdopted
from coordinator.status.causes import run_cause
from coordinator.status.messages import stall_message
from protocol.status import Cause, CauseCode, RunPhase
from protocol.types import Aborted, Committed, Role
from tests.builders import anchor_of, decisions_in, keyed
from tests.support.coordinator_run import (
    Run,
    attest,
    leave,
    members_by_replica,
    offer,
    pass_time,
    play_round,
    play_rounds,
    started,
    started_and_attested,
)

A, B, C, D, E = (keyed(i) for i in range(5))


class TestStall:
    def test_a_run_without_a_complete_replica_waits_and_names_the_missing_peers(self) -> None:
        run = started(1, 1)
        play_round(run)
        leave(run, A, C)
        pass_time(run, 3600, B)
        assert run.state.current_round == 2
        assert not decisions_in(run.events, Aborted)
        cause = run_cause(run.state)
        assert (cause.code, cause.round_number, cause.total) == (CauseCode.NO_REPLICA, 2, run.spec.rounds)
        assert [(each.replicas, *each.causes) for each in cause.causes] == [
            ((0,), Cause(CauseCode.MEMBER_GONE, peers=(A.peer,), stages=(0, 1))),
            ((1,), Cause(CauseCode.MEMBER_GONE, peers=(C.peer,), stages=(1,))),
        ]
        assert stall_message(run.state)

    def test_it_continues_in_the_same_round_when_a_replica_is_complete_again(self) -> None:
        run = started(1, 1)
        play_round(run)
        before = run.state.plans[-1]
        leave(run, A, C)
        pass_time(run, 60, B)
        run.accept(C.join(run.spec, Role.STAGE))
        lacks = run_cause(run.state).causes[-1]
        assert lacks.causes == (Cause(CauseCode.MEMBER_SYNCS, peers=(C.peer,), stages=(1,)),)
        *_, adopted = run.accept(Attest(C.peer, 1, 1, "stage", anchor_of(1, 1)))
        assert isinstance(adopted, PlanAdopted)
        plan = adopted.plan
        assert (plan.epoch, plan.from_round) == (before.epoch + 1, 2)
        assert plan.first_sample == 2 * run.spec.samples_per_round()
        assert "round 2 starts anew" in plan.reason
        play_round(run)
        assert isinstance(run.state.decisions[0, 2], Committed)

    def test_a_round_that_starts_anew_again_and_again_does_so_less_and_less_often(self) -> None:
        run = started_and_attested(replicas=0, pipelines=1)
        play_rounds(run, 2)
        began = run.now
        while run.now < began + 3600.0:
            run.now += run.spec.timing.heartbeat
            for peer in (A, B):
                run.send(Heartbeat(peer.peer, 3, 0))
            run.send(Retreat(A.peer, run.state.plans[-1].epoch, "no link"))
            run.send(Tick())
        assert 3600.0 / MOST_RESTART_SECONDS <= len(run.state.plans) < 3600.0 / MOST_RESTART_SECONDS + 12

    @pytest.mark.parametrize("withheld", [0, 1])
    def test_remaining_members_that_wait_do_not_end_the_round(self, withheld: int) -> None:
        run = started(0, 1)
        play_round(run)
        leave(run, B)
        for _ in range(2):
            run.accept(Await(A.peer, 0, 2, withheld))
            pass_time(run, 300, A)
        assert run.state.current_round == 2

    def test_a_peer_that_withholds_under_the_former_plan_does_not_know_its_assignment_yet(self) -> None:
        run = started(1)
        leave(run, A)
        run.accept(A.join(run.spec))
        attest(run, A, 0)
        pass_time(run, run.spec.timing.heartbeat, A)
        assert [(plan.epoch, plan.from_round) for plan in run.state.plans] == [(1, 1), (2, 1)]
        for epoch in (0, 1, 3):
            assert run.accept(Await(A.peer, 0, 1, epoch=epoch)) == ()
        withheld, *_ = run.accept(Await(A.peer, 0, 1, epoch=2))
        assert isinstance(withheld, PayloadWithheld)

    def test_the_run_goes_on_after_all_peers_were_lost_and_returned(self) -> None:
        run = started(2, 1)
        for _ in range(3):
            play_round(run)
        leave(run, A, B, C, D)
        run.accept(Start())
        pass_time(run, 100)
        for peer, role in zip((A, B, C, D), (*[Role.REPLICA] * 2, *[Role.STAGE] * 2), strict=True):
            run.accept(peer.join(run.spec, role))
            attest(run, peer)
        play_round(run)
        play_round(run)
        assert members_by_replica(run) == {0: [A.peer], 1: [B.peer], 2: [C.peer, D.peer]}
        assert all(isinstance(decision, Committed) for decision in run.state.decisions.values())

    def test_a_round_with_an_offer_ends_before_the_plan_changes(self) -> None:
        run = started(1)
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        leave(run, A)
        run.accept(A.join(run.spec))
        attest(run, A, 0)
        assert len(run.state.plans) == 1
        pass_time(run, run.spec.timing.decide + run.spec.timing.match_window, A)
        assert run.state.current_round == 2
        assert members_by_replica(run) == {0: [A.peer]}
        play_round(run)

    def test_peers_that_attested_too_little_do_not_end_the_stall(self) -> None:
        run = started(1)
        for _ in range(3):
            play_round(run)
        leave(run, A)
        run.accept(A.join(run.spec))
        for number in (0, 1):
            attest(run, A, number)
        assert len(run.state.plans) == 1
        attest(run, A, 2)
        assert len(run.state.plans) == 2


def play_last_round(run: Run) -> None:
    """A and B contribute; A attests the result, B does not."""
    for stage in range(run.spec.swarm.stages):
        payloads = tuple(peer.payload(run.spec, stage, 1) for peer in (A, B))
        for peer, payload in zip((A, B), payloads, strict=True):
            offer(run, peer, payload)
        for peer in (A, B):
            run.accept(Report(peer.peer, stage, 1, payloads))
        run.accept(Attest(A.peer, stage, 1, "stage", anchor_of(stage, 1)))


class TestEnd:
    def test_a_run_that_lost_all_peers_after_the_last_decision_waits_for_a_holder(self) -> None:
        run = started(1, rounds=1)
        for stage in (0, 1):
            payload = A.payload(run.spec, stage, 1)
            run.accept(Offer(A.peer, payload))
            run.accept(Report(A.peer, stage, 1, (payload,)))
        leave(run, A)
        assert run.state.phase is RunPhase.TRAINING
        cause = run_cause(run.state)
        assert (cause.code, cause.stages[0]) == (CauseCode.DIGESTS_LACKING, 0)
        run.accept(A.join(run.spec))
        attest(run, A, 1)
        assert run.state.phase is RunPhase.FINISHED
        run.accept(Leave(A.peer, "finished"))
        assert run.state.peers[A.peer].finished

    def test_a_member_that_stays_behind_delays_the_end_for_a_bounded_time(self) -> None:
        run = started(2, rounds=1)
        play_last_round(run)
        run.accept(Retreat(B.peer, run.state.plans[-1].epoch, "it lacks a payload"))
        assert run.state.phase is RunPhase.TRAINING, "it may still fetch what it lacks"
        pass_time(run, run.spec.timing.decide, A, B)
        assert run.state.phase is RunPhase.TRAINING
        pass_time(run, 5.0, A, B)
        assert run.state.phase is RunPhase.FINISHED

    def test_followers_are_not_waited_for_but_count_as_finished_when_they_are_done(self) -> None:
        run = started(2, rounds=2)
        play_round(run)
        run.accept(C.join(run.spec))
        play_round(run)
        assert run.state.phase is RunPhase.FINISHED
        attest(run, C, 2)
        run.accept(Leave(C.peer, "finished"))
        assert run.state.peers[C.peer].finished
