"""Reservations: which assignment a peer gets that joins a running run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.base.persistent_map import PersistentMap
from coordinator.placement.cost_model import memory_needed
from coordinator.placement.reservations import Vacancies, reserve_assignments
from coordinator.placement.rules import fits
from coordinator.run.state.apply import apply
from coordinator.run.state.commands import Attest, Ban, Leave, Start
from coordinator.run.state.events import AssignmentReserved
from coordinator.run.state.transaction import Transaction
from coordinator.status.causes import peer_cause
from protocol.errors import ErrorCode
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.status import CauseCode, RunPhase
from protocol.types import Capacity, Estimates, Lifecycle, ReservedAssignment, Role, StageRange
from tests.builders import keyed, spec_of
from tests.support.coordinator_run import Run, attest, codes_of, leave, pass_time, play_round, started

A, B, C, D, E = (keyed(i) for i in range(5))


class TestReservations:
    def test_the_first_plan_reserves_the_assignments_of_its_members(self) -> None:
        run = started(1, 1)
        assert run.state.reservations == {
            A.peer: ReservedAssignment(A.peer, 0, 0, StageRange(0, 2)),
            B.peer: ReservedAssignment(B.peer, 1, 0, StageRange(0, 1)),
            C.peer: ReservedAssignment(C.peer, 1, 1, StageRange(1, 2)),
        }

    def test_a_full_replica_that_comes_late_follows_under_a_new_index(self) -> None:
        run = started(1, 1)
        _, given = run.accept(D.join(run.spec))
        assert given == AssignmentReserved(run.now, ReservedAssignment(D.peer, 2, 0, StageRange(0, 2)))
        assert run.state.peers[D.peer].lifecycle is Lifecycle.SYNCING

    def test_stage_peers_that_come_late_form_a_pipeline_of_one_stage_each(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE))
        run.accept(C.join(run.spec, Role.STAGE))
        run.accept(D.join(run.spec, Role.STAGE))
        reservations = [run.state.reservations[peer.peer] for peer in (B, C, D)]
        assert [(each.replica, each.position) for each in reservations] == [(1, 0), (1, 1), (2, 0)]

    def test_a_peer_that_comes_back_gets_its_reservation_back(self) -> None:
        run = started(1, 2)
        leave(run, C, D)
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer] == ReservedAssignment(D.peer, 2, 0, StageRange(0, 1))

    def test_a_new_peer_takes_the_first_assignment_of_a_lost_peer(self) -> None:
        run = started(1, 2)
        leave(run, C, D)
        newcomer = keyed(9)
        run.accept(newcomer.join(run.spec, Role.STAGE))
        assert run.state.reservations[newcomer.peer] == ReservedAssignment(
            newcomer.peer, 1, 1, StageRange(1, 2)
        )
        assert C.peer not in run.state.reservations
        run.accept(C.join(run.spec, Role.STAGE))
        assert run.state.reservations[C.peer] == ReservedAssignment(C.peer, 2, 0, StageRange(0, 1))

    def test_an_assignment_is_only_for_its_role(self) -> None:
        run = started(1, 1)
        leave(run, A)
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer].replica == 2
        run.accept(E.join(run.spec, Role.REPLICA))
        assert run.state.reservations[E.peer] == ReservedAssignment(E.peer, 0, 0, StageRange(0, 2))

    def test_neighbours_without_endpoints_leave_one_of_them_a_spare_until_an_assignment_is_free(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        assert len(run.accept(C.join(run.spec, Role.STAGE, endpoint=""))) == 1
        assert C.peer not in run.state.reservations
        assert codes_of(peer_cause(run.state, C.peer))[-1] is CauseCode.SPARE
        run.refuse(Attest(C.peer, 0, 0, "stage", "digest"), ErrorCode.BAD_REQUEST)
        *_, given = run.accept(Leave(B.peer, "interrupted"))
        assert isinstance(given, AssignmentReserved)
        assert run.state.reservations == {
            A.peer: ReservedAssignment(A.peer, 0, 0, StageRange(0, 2)),
            C.peer: ReservedAssignment(C.peer, 1, 0, StageRange(0, 1)),
        }

    def test_a_spare_starts_the_next_pipeline_when_the_one_before_it_is_full(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(C.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(D.join(run.spec, Role.STAGE))
        assert (run.state.reservations[D.peer].replica, run.state.reservations[C.peer].replica) == (1, 2)

    def test_a_peer_that_comes_back_in_another_role_frees_its_reservation(self) -> None:
        run = started(1, 1)
        leave(run, C)
        run.accept(C.join(run.spec, Role.REPLICA))
        assert run.state.reservations[C.peer].replica == 2
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer] == ReservedAssignment(D.peer, 1, 1, StageRange(1, 2))

    @pytest.mark.parametrize("at_first", [0, 2**30])
    def test_a_peer_that_comes_back_with_less_memory_gets_its_reservation_back(self, at_first: int) -> None:
        run = Run(spec_of(2, 0, 1, 40))
        run.accept(Start())
        for peer in (A, B):
            run.accept(peer.join(run.spec, Role.STAGE, memory_bytes=at_first))
        before = run.state.reservations[A.peer]
        leave(run, A)
        run.accept(A.join(run.spec, Role.STAGE, memory_bytes=1000))
        assert run.state.reservations[A.peer] == before
        attest(run, A, 0)
        attest(run, B, 0)
        pass_time(run, run.spec.timing.heartbeat, A, B)
        play_round(run)

    def test_a_reservation_is_not_kept_for_a_peer_that_its_neighbour_cannot_reach(self) -> None:
        run = started(1, 0)
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(C.join(run.spec, Role.STAGE))
        leave(run, C)
        run.accept(C.join(run.spec, Role.STAGE, endpoint=""))
        assert C.peer not in run.state.reservations

    def test_a_peer_with_too_little_memory_for_the_vacancies_starts_a_pipeline(self) -> None:
        """The last stage takes less memory than the first, which has more in flight."""
        spec = spec_of(2, 0, 1, 40)
        weak = int(memory_needed(spec, StageRange(1, 2), 1, "cpu") / (1 - MEMORY_RESERVE)) + 1
        assert weak < memory_needed(spec, StageRange(0, 1), 2, "cpu")
        run = started(0, 1)
        for peer in (C, D, E):
            run.accept(peer.join(run.spec, Role.STAGE, memory_bytes=weak))
        reservations = [run.state.reservations.get(peer.peer) for peer in (C, D, E)]
        last = StageRange(1, 2)
        assert reservations == [
            ReservedAssignment(C.peer, 1, 1, last),
            ReservedAssignment(D.peer, 2, 1, last),
            None,
        ]
        play_round(run)
        run.accept(keyed(6).join(run.spec, Role.STAGE))
        assert run.state.reservations[keyed(6).peer].replica == 1

    @pytest.mark.parametrize("is_declared", [True, False])
    def test_a_card_that_is_too_small_fits_where_main_memory_is_known(self, is_declared: bool) -> None:
        run, stages, main = started(0, 1), StageRange(0, 1), 2**34
        weak = int(memory_needed(run.spec, stages, 2, "cuda", main) / (1 - MEMORY_RESERVE)) + 1
        assert weak < memory_needed(run.spec, stages, 2, "cuda")
        able = Capacity("cuda", weak, 1)
        knowing = replace(able, main_bytes=main)
        run.accept(replace(C.join(run.spec, Role.STAGE), capacity=able))
        assert not fits(run.state, C.peer, stages, 2)
        if is_declared:
            told = replace(run.state.peers[C.peer], capacity=knowing)
            state = replace(run.state, peers=run.state.peers.set(C.peer, told))
        else:  # before it joined, it had measured nothing
            measured = run.state.estimates.set(C.peer, Estimates(knowing, 0.0))
            state = replace(run.state, estimates=measured)
        assert fits(state, C.peer, stages, 2)

    def test_spares_get_the_same_assignments_together_as_one_by_one(self) -> None:
        run = started(1, 1)
        spares = [keyed(i) for i in range(10, 22)]
        for peer in spares:
            number = peer.number
            endpoint, role = "h:1" if number % 3 else "", Role.STAGE if number % 5 else Role.REPLICA
            run.accept(peer.join(run.spec, role, endpoint, memory_bytes=10**6 * (1 + number % 4)))
        leave(run, C)
        kept = PersistentMap({peer.peer: run.state.reservations[peer.peer] for peer in (A, B)})
        layouts = {i: run.state.layouts[i] for i in (0, 1)}
        transaction = Transaction(replace(run.state, reservations=kept, layouts=layouts), run.now)
        one_by_one = transaction.state
        reserve_assignments(transaction)
        for peer in spares:
            reservation = Vacancies(one_by_one).reservation_for(one_by_one.peers[peer.peer])
            if reservation is not None:
                one_by_one = apply(one_by_one, AssignmentReserved(run.now, reservation))
        assert transaction.state == one_by_one
        assert len({event.reservation.replica for event in transaction.events}) > 2

    def test_the_reservation_of_a_banned_peer_is_free(self) -> None:
        run = started(1, 1)
        run.accept(Ban(C.peer, "a test"))
        run.accept(D.join(run.spec, Role.STAGE))
        assert run.state.reservations[D.peer].replica == 1

    def test_no_peer_joins_a_run_that_has_finished(self) -> None:
        run = started(1, rounds=1)
        play_round(run)
        assert run.state.phase is RunPhase.FINISHED
        run.refuse(B.join(run.spec), ErrorCode.RUN_STARTED)
