"""Peers that are silent or leave, and their replicas."""

from __future__ import annotations

from coordinator.run.state.apply import replay
from coordinator.run.state.commands import Heartbeat, Leave, Offer, Report, Start, Tick
from coordinator.run.state.events import (
    PeerLost,
    PeerSeen,
    PlanAdopted,
    RoundDecided,
)
from coordinator.run.state.state import State
from coordinator.status.causes import run_cause
from protocol.errors import ErrorCode
from protocol.math.sampling import sample_range
from protocol.status import CauseCode, RunPhase
from tests.builders import keyed
from tests.support.coordinator_run import Run, beat_for, settle

A, B, C, D = (keyed(i) for i in range(4))


class TestLosses:
    def test_a_silent_peer_is_lost_and_a_beating_one_is_not(self, run: Run) -> None:
        run.now += run.spec.timing.lost_after / 2
        run.accept(Heartbeat(A.peer, 1, 3))
        run.now += run.spec.timing.lost_after / 2 + 1
        (lost,) = run.accept(Tick())
        assert isinstance(lost, PeerLost)
        assert lost.peer == B.peer
        assert run.accept(Tick()) == ()
        run.refuse(Heartbeat(B.peer, 1, 3), ErrorCode.UNKNOWN_PEER)
        assert run.state.last_seen[A.peer].inner_step == 3

    def test_a_restart_of_the_coordinator_gives_all_peers_the_full_time_again(self, run: Run) -> None:
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 1)))
        run.now += 1000
        run.accept(Start())
        assert run.accept(Tick()) == ()

    def test_the_replica_is_dropped_from_the_next_round_on(self, mixed: Run) -> None:
        mixed.accept(Leave(C.peer, "interrupted"))
        assert len(mixed.state.plans) == 1
        a, b = A.payload(mixed.spec, 0, 1), B.payload(mixed.spec, 0, 1)
        mixed.accept(Offer(B.peer, b))
        mixed.accept(Offer(A.peer, a))
        mixed.accept(Report(B.peer, 0, 1, (a, b)))
        *_, adopted, committed = mixed.accept(Report(A.peer, 0, 1, (a, b)))
        assert isinstance(adopted, PlanAdopted)
        assert isinstance(committed, RoundDecided)
        plan = adopted.plan
        assert [replica.index for replica in plan.replicas] == [0]
        assert (plan.epoch, plan.from_round) == (2, 2)
        assert "replica-1" in plan.reason
        assert len(committed.decision.entries) == 2, "what the lost pipeline had finished still counts"
        assert settle(mixed, 1, 1, [A]).next_epoch == 2
        mixed.refuse(Offer(B.peer, B.payload(mixed.spec, 0, 2)), ErrorCode.BAD_REQUEST)

    def test_a_loss_after_the_first_decision_of_a_round_waits_for_the_next(self, mixed: Run) -> None:
        settle(mixed, 0, 1, [A, B])
        mixed.accept(Leave(C.peer, "interrupted"))
        assert settle(mixed, 1, 1, [A]).next_epoch == 1
        assert settle(mixed, 0, 2, [A]).next_epoch == 2
        assert mixed.state.plans[1].from_round == 3

    def test_without_a_complete_replica_the_run_waits_and_says_so(self, run: Run) -> None:
        run.accept(Leave(A.peer, "interrupted"))
        run.accept(Leave(B.peer, "interrupted"))
        assert run.state.phase is RunPhase.TRAINING
        assert run_cause(run.state).code is CauseCode.NO_REPLICA

    def test_sample_ranges_go_on_without_gap_over_a_change_of_plan(self, mixed: Run) -> None:
        mixed.accept(Leave(C.peer, "interrupted"))
        settle(mixed, 0, 1, [A])
        size = mixed.spec.samples_per_round()
        first, second = mixed.state.plans
        trained = [sample_range(first, mixed.spec, 1, 0), sample_range(first, mixed.spec, 1, 1)]
        trained.append(sample_range(second, mixed.spec, 2, 0))
        assert [i for part in trained for i in part] == list(range(3 * size))


def test_heartbeats_leave_no_trace_but_everything_else_replays(mixed: Run) -> None:
    settle(mixed, 0, 1, [A, B])
    beat_for(mixed, 5, A, B, C)
    mixed.accept(Leave(C.peer, "interrupted"))
    settle(mixed, 1, 1, [A])
    stored = [event for event in mixed.events if not isinstance(event, PeerSeen)]
    assert len(stored) < len(mixed.events)
    assert replay(State(mixed.spec, mixed.spec.name), stored) == mixed.state
