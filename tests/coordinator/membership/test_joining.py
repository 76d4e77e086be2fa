"""Who may join, when, and in which role; how the run starts from measured speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.run.state.commands import Heartbeat, Leave, Start, Tick
from coordinator.run.state.events import (
    Event,
    PeerJoined,
    PeerLost,
    PeerMeasured,
    PlanAdopted,
)
from coordinator.status.causes import run_cause
from protocol.errors import ErrorCode
from protocol.status import CauseCode, RunPhase
from protocol.types import PROTOCOL_VERSION, Estimates, Lifecycle, LinkEstimate, PeerId, Role
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_run import Run

A, B, C, D = (keyed(i) for i in range(4))


class TestJoin:
    def test_another_protocol_version_is_refused_with_both_versions(self) -> None:
        run = Run(spec_of())
        wrong = replace(A.join(run.spec), protocol_version=7, spec_hash="also wrong", peer=PeerId("?"))
        cause = run.refuse(wrong, ErrorCode.VERSION_MISMATCH).cause
        assert f"version {PROTOCOL_VERSION}" in cause
        assert "version 7" in cause

    def test_another_spec_is_refused_with_both_full_hashes(self) -> None:
        run, other = Run(spec_of()), spec_of(rounds=9)
        cause = run.refuse(replace(A.join(run.spec), spec_hash=other.hash), ErrorCode.SPEC_MISMATCH).cause
        assert run.spec.hash in cause
        assert other.hash in cause

    def test_a_node_without_spec_is_accepted(self) -> None:
        run = Run(spec_of())
        assert run.accept(replace(A.join(run.spec), spec_hash=""))

    @pytest.mark.parametrize("name", ["", "peer", "1" * 65, A.peer[:-1], "0OIl"])
    def test_a_name_that_is_no_peer_id_is_refused(self, name: str) -> None:
        run = Run(spec_of())
        run.refuse(replace(A.join(run.spec), peer=PeerId(name)), ErrorCode.BAD_REQUEST)

    def test_a_live_peer_cannot_join_twice_but_a_gone_one_can_return_before_the_start(self) -> None:
        run = Run(spec_of())
        run.accept(A.join(run.spec))
        run.refuse(A.join(run.spec, Role.STAGE), ErrorCode.ALREADY_ACTIVE)
        run.accept(Heartbeat(A.peer, 0, 0))
        run.refuse(A.join(run.spec), ErrorCode.ALREADY_ACTIVE)
        run.accept(Leave(A.peer, "changed my mind"))
        run.accept(A.join(run.spec))
        assert run.state.peers[A.peer].arrival == 2

    def test_the_refusal_of_a_surplus_peer_names_the_missing_roles(self) -> None:
        run = Run(spec_of(2, 1, 1))
        run.accept(A.join(run.spec))
        refusal = run.refuse(B.join(run.spec), ErrorCode.RUN_FULL)
        assert "2 more stage peers (0 of 2 here)" in refusal.cause

    def test_one_more_stage_peer_is_taken_where_two_could_not_be_neighbours(self) -> None:
        run = Run(spec_of(2, 0, 1))
        run.accept(A.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(B.join(run.spec, Role.STAGE, endpoint=""))
        run.refuse(C.join(run.spec, Role.STAGE, endpoint=""), ErrorCode.RUN_FULL)
        run.accept(C.join(run.spec, Role.STAGE))
        assert [m.peer for m in run.state.plans[0].replicas[0].members] == [A.peer, C.peer]

    def test_a_second_join_within_two_heartbeats_is_another_node(self, run: Run) -> None:
        run.accept(Heartbeat(A.peer, 0, 0))
        run.now += 2 * run.spec.timing.heartbeat
        run.refuse(A.join(run.spec), ErrorCode.ALREADY_ACTIVE)
        run.now += 0.1
        lost, joined, *_ = run.accept(A.join(run.spec))
        assert isinstance(lost, PeerLost)
        assert isinstance(joined, PeerJoined)

    def test_a_join_may_be_repeated_if_its_answer_was_lost(self) -> None:
        run = Run(spec_of())
        run.accept(A.join(run.spec))
        assert run.accept(A.join(run.spec)) == ()
        run.accept(B.join(run.spec))
        assert run.accept(B.join(run.spec)) == ()

    def test_the_last_peer_needed_starts_the_run_in_the_same_step(self) -> None:
        run = Run(spec_of())
        run.accept(A.join(run.spec))
        assert run.state.phase is RunPhase.GATHERING
        joined, adopted = run.accept(B.join(run.spec))
        assert isinstance(joined, PeerJoined)
        assert isinstance(adopted, PlanAdopted)
        assert (adopted.plan.epoch, adopted.plan.from_round, adopted.plan.first_sample) == (1, 1, 0)
        assert run.state.current_round == 1
        assert {p.lifecycle for p in run.state.peers.values()} == {Lifecycle.TRAINING}


class TestMeasured:
    """What peers tell of themselves, and how the run begins with it."""

    def told(self, run: Run, peer: Keyed, flops: float, *links: LinkEstimate) -> tuple[Event, ...]:
        capacity = replace(run.state.peers[peer.peer].capacity, flops=flops)
        return run.accept(Heartbeat(peer.peer, 1, 0, Estimates(capacity, 0.0, links)))

    def gathered(self, *flops: float) -> Run:
        """Stage peers that have measured their lines; their speeds may follow."""
        run = Run(spec_of(3, 0, 1, swarm__members=2))
        run.accept(Start())
        for i, each in enumerate(flops):
            join = keyed(i).join(run.spec, Role.STAGE)
            run.accept(replace(join, capacity=replace(join.capacity, uplink=1e6, downlink=1e6, flops=each)))
        return run

    def test_the_run_starts_when_measuring_peers_have_reported_their_speed(self) -> None:
        run = self.gathered(1e9, 0.0)
        assert run.state.phase is RunPhase.GATHERING
        assert run_cause(run.state).code is CauseCode.SPEED_UNKNOWN
        self.told(run, B, 1e9)
        run.accept(Tick())
        assert run.state.phase is RunPhase.TRAINING

    def test_memory_that_is_lacking_is_told_before_a_speed_that_is_not_measured(self) -> None:
        """Where no stage fits, no speed can be measured either."""
        run = Run(spec_of(3, 0, 1, swarm__members=2))
        run.accept(Start())
        for i, memory in enumerate((1 << 30, 1000)):
            join = keyed(i).join(run.spec, Role.STAGE)
            able = replace(join.capacity, uplink=1e6, downlink=1e6, memory_bytes=memory)
            run.accept(replace(join, capacity=able))
        assert run_cause(run.state).code is CauseCode.MEMORY_LACKING

    def test_the_run_starts_without_a_missing_speed_after_a_while(self) -> None:
        run = self.gathered(1e9, 0.0)
        run.now += 19.0
        run.accept(Heartbeat(A.peer, 0, 0))
        run.accept(Heartbeat(B.peer, 0, 0))
        run.accept(Tick())
        assert run.state.phase is RunPhase.GATHERING
        run.now += 2.0
        run.accept(Tick())
        assert run.state.phase is RunPhase.TRAINING

    def test_a_surplus_peer_at_the_start_gets_a_reservation_as_spare(self) -> None:
        run = self.gathered(1e9, 0.0)
        join = C.join(run.spec, Role.STAGE)
        run.refuse(replace(join, capacity=replace(join.capacity, uplink=1e6)), ErrorCode.RUN_FULL)
        run = Run(spec_of(3, 0, 1, swarm__members=3))
        run.accept(Start())
        for i in range(3):
            join = keyed(i).join(run.spec, Role.STAGE)
            run.accept(replace(join, capacity=replace(join.capacity, uplink=1e9, downlink=1e9)))
        for peer, flops in ((A, 1e12), (B, 1e12), (C, 1e6)):
            self.told(run, peer, flops)
        run.accept(Tick())
        assert run.state.plans[-1].replica_of(C.peer) is None
        assert C.peer in run.state.reservations

    def test_frequent_reports_are_not_stored(self) -> None:
        run = self.gathered(1e9, 1e9)
        for number in range(500):
            run.now += 0.1
            self.told(run, A, 1e9 + number)
        assert sum(isinstance(event, PeerMeasured) for event in run.events) < 10
        run.now += 20.0
        self.told(run, A, 7e9)
        assert run.state.estimates[A.peer].capacity.flops == 7e9

    def test_links_to_strangers_are_not_stored(self) -> None:
        run = self.gathered(1e9, 1e9)
        stranger = LinkEstimate(D.peer, 0.1, 1e6)
        self.told(run, A, 2e9, LinkEstimate(B.peer, 0.1, 1e6), stranger)
        assert [link.peer for link in run.state.estimates[A.peer].links] == [B.peer]
