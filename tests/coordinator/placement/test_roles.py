"""Roles that the coordinator chooses: when a peer joins, and when the run starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.placement.cost_model import memory_needed
from coordinator.placement.roles import obstacle, payload_bytes, roles_at_start
from coordinator.run.state.commands import Join, Tick
from coordinator.run.state.events import InviteCreated, InviteUsed, RoleChanged
from coordinator.run.state.records import Peer
from coordinator.status.causes import run_cause
from coordinator.status.messages import event_message
from coordinator.status.run_status import run_status
from node.core.model.shapes import payload_layout
from protocol.errors import ErrorCode
from protocol.math.flops import microbatch_flops
from protocol.roles import POLICIES
from protocol.spec.run import RunSpec
from protocol.status import CauseCode, RunPhase
from protocol.types import Capacity, Estimates, Lifecycle, PeerId, Reachability, Role, StageRange
from tests.builders import Keyed, spec_of
from tests.support.coordinator_run import (
    ALL,
    Run,
    attest,
    joined_run,
    leave,
    measure,
    play_rounds,
    slot_of,
    started_and_attested,
)

A, B, C, D, E = ALL[:5]
SPEC = spec_of(stages=2, replicas=1, pipelines=1)
WHOLE = memory_needed(SPEC, StageRange(0, 2), 1, "cpu")
ENOUGH, LITTLE = int(WHOLE / 0.9) + 2, int(WHOLE * 0.8 / 0.9)
"""The run keeps a tenth free. The lesser memory holds each stage of a pipeline, but not both."""


def auto(peer: Keyed, spec: RunSpec, memory_bytes: int = ENOUGH, **more: object) -> Join:
    return replace(peer.join(spec, memory_bytes=memory_bytes), role=None, **more)  # type: ignore[arg-type]


def role_of(run: Run, peer: Keyed) -> Role:
    return run.state.peers[peer.peer].role


class TestObstacles:
    def able(self, **fields: float) -> Capacity:
        return replace(Capacity("cpu", ENOUGH, 1), **fields)  # type: ignore[arg-type]

    def test_memory_that_holds_the_whole_model_with_its_reserve_is_enough(self) -> None:
        assert not obstacle(SPEC, self.able())
        assert "of memory" in obstacle(SPEC, self.able(memory_bytes=LITTLE))
        assert obstacle(SPEC, self.able(memory_bytes=0)) == "its memory is not known"

    def test_a_line_has_to_carry_the_payload_of_all_stages_within_a_round(self) -> None:
        nbytes = payload_bytes(SPEC)
        assert not obstacle(SPEC, self.able(uplink=nbytes / (SPEC.timing.fetch - 0.1)))
        assert "its line" in obstacle(SPEC, self.able(uplink=nbytes / (SPEC.timing.fetch + 0.1)))
        assert "its line" in obstacle(SPEC, self.able(uplink=nbytes / 12), round_seconds=10.0)
        assert not obstacle(SPEC, self.able(uplink=nbytes / 4), round_seconds=0.1), "a group waits that long"

    @pytest.mark.parametrize(("balance", "allowed"), [(False, 2.0), (True, 4.0)])
    def test_a_slow_peer_does_not_train_alone(self, balance: bool, allowed: float) -> None:
        spec = spec_of(stages=2, replicas=1, pipelines=1, grouping__balance=balance)
        operations = spec.inner.steps * spec.inner.microbatches * microbatch_flops(spec, range(2))
        seconds = 60.0
        for share, is_too_slow in ((0.99, False), (1.01, True)):
            able = self.able(flops=operations / (allowed * seconds * share))
            assert bool(obstacle(spec, able, seconds)) is is_too_slow
            assert not obstacle(spec, able), "nothing is known of the others"

    @pytest.mark.parametrize(
        "outer",
        [
            {},
            {"outer__quantizer": "1bit"},
            {"outer__quantizer": "none"},
            {"outer__top_k": 0},
        ],
    )
    def test_the_size_of_a_payload_is_about_right(self, outer: dict[str, object]) -> None:
        spec = spec_of(stages=2, replicas=1, model__width=256, model__feed_forward=704, **outer)
        exact = sum(payload_layout(spec, stage).nbytes for stage in range(2))
        assert payload_bytes(spec) == pytest.approx(exact, rel=0.1)


class TestTheStart:
    def test_auto_peers_fill_what_the_run_lacks(self) -> None:
        run = joined_run(SPEC)
        run.accept(auto(A, SPEC, LITTLE))
        run.accept(auto(B, SPEC))
        assert run_cause(run.state).code is CauseCode.PEERS_LACKING
        run.accept(auto(C, SPEC, LITTLE))
        assert run.state.phase is RunPhase.TRAINING
        assert [role_of(run, peer) for peer in (A, B, C)] == [Role.STAGE, Role.REPLICA, Role.STAGE]
        first, second = run.state.plans[0].replicas
        assert [member.peer for member in first.members] == [B.peer]
        assert {member.peer for member in second.members} == {A.peer, C.peer}
        shown = {peer.peer: peer.role_reason for peer in run_status(run.state, (), run.now, 0.0).peers}
        assert "carries the whole model" in shown[B.peer]
        assert "takes" in shown[A.peer]
        assert "can give" in shown[A.peer]

    def test_roles_that_peers_have_chosen_bind(self) -> None:
        run = joined_run(SPEC)
        run.accept(auto(A, SPEC))
        assert role_of(run, A) is Role.REPLICA
        run.accept(B.join(SPEC, Role.REPLICA, memory_bytes=ENOUGH))
        change = next(event for event in run.events if isinstance(event, RoleChanged))
        assert (change.peer, change.role) == (A.peer, Role.STAGE)
        assert "is a stage peer now: the run has the full replicas" in event_message(change)
        run.accept(C.join(SPEC, Role.STAGE, memory_bytes=ENOUGH))
        assert run.state.phase is RunPhase.TRAINING
        assert [role_of(run, peer) for peer in (A, B, C)] == [Role.STAGE, Role.REPLICA, Role.STAGE]

    def test_the_fastest_that_carries_the_whole_model_trains_alone(self) -> None:
        run = joined_run(SPEC)
        for peer in (A, B, C):
            join = auto(peer, SPEC)
            run.accept(replace(join, capacity=replace(join.capacity, uplink=1e9, downlink=1e9)))
        assert run_cause(run.state).code is CauseCode.SPEED_UNKNOWN
        for peer, flops in ((A, 1e9), (B, 3e9), (C, 2e9)):
            measure(run, peer, flops, 1e9)
        run.accept(Tick())
        assert run.state.phase is RunPhase.TRAINING
        assert [role_of(run, peer) for peer in (A, B, C)] == [Role.STAGE, Role.REPLICA, Role.STAGE]

    def test_a_peer_that_only_dials_trains_alone_if_the_pipeline_needs_the_others(self) -> None:
        run = joined_run(SPEC)
        run.accept(auto(A, SPEC))
        for peer in (B, C):
            run.accept(auto(peer, SPEC, endpoint="", reachability=Reachability.DIAL_ONLY))
        assert run.state.phase is RunPhase.GATHERING, "each replica needs a peer that others reach"
        assert Counter(role_of(run, peer) for peer in (A, B, C)) == {Role.STAGE: 2, Role.REPLICA: 1}

    def test_a_peer_that_cannot_be_what_is_missing_is_told_why(self) -> None:
        run = joined_run(SPEC, Role.STAGE, Role.STAGE)
        before = run.state
        refusal = run.refuse(auto(C, SPEC, LITTLE), ErrorCode.RUN_FULL)
        assert "of this peer, the whole model takes" in refusal.cause
        assert run.state == before
        run.accept(auto(D, SPEC))
        assert run.state.phase is RunPhase.TRAINING

    def test_a_repeated_join_of_an_auto_peer_changes_nothing(self) -> None:
        run = joined_run(SPEC)
        run.accept(auto(A, SPEC))
        before = run.state
        assert run.accept(auto(A, SPEC)) == ()
        assert run.state == before
        run.refuse(A.join(SPEC, Role.STAGE, memory_bytes=ENOUGH), ErrorCode.ALREADY_ACTIVE)

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([None, Role.STAGE, Role.REPLICA]), st.integers(1, 2), st.integers(0, 3)
            ),
            max_size=8,
        ),
        st.integers(0, 3),
        st.integers(0, 2),
    )
    def test_only_peers_that_carry_the_model_fill_only_what_is_missing(
        self, peers: list[tuple[Role | None, int, int]], replicas: int, pipelines: int
    ) -> None:
        spec = spec_of(stages=2, replicas=max(replicas, int(pipelines == 0)), pipelines=pipelines)
        known = [
            Peer(
                PeerId(f"p{i}"),
                role or Role.STAGE,
                Capacity("cpu", ENOUGH if size == 2 else LITTLE, 1, flops=float(speed)),
                "h:1",
                i,
                Lifecycle.READY,
                role_reason="" if role else "auto",
            )
            for i, (role, size, speed) in enumerate(peers, 1)
        ]
        estimates = {peer.peer: Estimates(peer.capacity) for peer in known}
        chosen = roles_at_start(known, spec, estimates)
        assert chosen == roles_at_start(known[::-1], spec, estimates)
        assert chosen.keys() == {peer.peer for peer in known if peer.is_flexible}
        alone = [peer for peer in known if chosen.get(peer.peer) and chosen[peer.peer].role is Role.REPLICA]
        assert all(peer.capacity.memory_bytes == ENOUGH for peer in alone)
        bound = sum(peer.role is Role.REPLICA and not peer.is_flexible for peer in known)
        able = sum(peer.is_flexible and peer.capacity.memory_bytes == ENOUGH for peer in known)
        lacking = max(0, POLICIES[Role.REPLICA].peers_needed(spec) - bound)
        assert len(alone) == min(able, lacking)
        passed_over = [
            peer.capacity.flops
            for peer in known
            if peer.is_flexible and peer not in alone and peer.capacity.memory_bytes == ENOUGH
        ]
        assert all(peer.capacity.flops >= max(passed_over, default=0.0) for peer in alone)


class TestNewcomers:
    def test_a_newcomer_that_carries_the_whole_model_becomes_a_full_replica(self) -> None:
        run = started_and_attested(1, 1)
        run.accept(auto(D, run.spec))
        assert (role_of(run, D), slot_of(run, D)) == (Role.REPLICA, (2, 0))
        assert run.state.reservations[D.peer].stages == StageRange(0, 2)
        run.accept(auto(E, run.spec, LITTLE))
        assert (role_of(run, E), slot_of(run, E)) == (Role.STAGE, (3, 0))

    def test_a_newcomer_takes_the_only_vacancy_of_a_pipeline(self) -> None:
        run = started_and_attested(1, 1)
        play_rounds(run)
        leave(run, C)
        run.accept(auto(D, run.spec))
        assert (role_of(run, D), slot_of(run, D)) == (Role.STAGE, (1, 1))
        assert "replica-1 lacks only a peer" in run.state.peers[D.peer].role_reason

    def test_a_newcomer_that_is_too_slow_alone_becomes_a_stage_peer(self) -> None:
        run = started_and_attested(1, 1)
        measured = 60.0
        run.state = replace(run.state, phase_seconds={0: (measured,)})
        operations = run.spec.inner.steps * run.spec.inner.microbatches * microbatch_flops(run.spec, range(2))
        join = auto(D, run.spec)
        run.accept(replace(join, capacity=replace(join.capacity, flops=operations / (10 * measured))))
        assert role_of(run, D) is Role.STAGE
        assert "alone it computes a round in 600 s, and the others need 60 s" in (
            run.state.peers[D.peer].role_reason
        )

    def test_a_peer_that_comes_back_keeps_its_role_and_its_place(self) -> None:
        run = started_and_attested(1, 1)
        play_rounds(run)
        leave(run, C)
        run.accept(auto(D, run.spec))
        attest(run, D)
        play_rounds(run, 2)
        before = slot_of(run, D)
        leave(run, D)
        run.accept(auto(D, run.spec))
        assert (role_of(run, D), slot_of(run, D)) == (Role.STAGE, before)

    def test_the_role_of_an_invite_binds(self) -> None:
        run = started_and_attested(1, 1)
        for invite, peer, role in (("one", D, Role.STAGE), ("two", E, Role.RELAY)):
            run.apply(InviteCreated(run.now, invite, "0" * 64, 1, run.now + 60, role))
            run.apply(InviteUsed(run.now, invite, peer.peer))
        run.accept(auto(D, run.spec))
        assert role_of(run, D) is Role.STAGE
        assert not run.state.peers[D.peer].is_flexible
        run.refuse(auto(E, run.spec), ErrorCode.BAD_REQUEST)
