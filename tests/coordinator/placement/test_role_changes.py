"""Roles that the coordinator changes between two rounds, and what stops a change."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from coordinator.placement.cost_model import memory_needed
from coordinator.run.state.commands import Attest, Drain
from coordinator.run.state.events import RoleChanged
from protocol.spec.fixed import SETTLE_ROUNDS
from protocol.types import Part, Role, StageRange
from tests.builders import Keyed, spec_of
from tests.support.coordinator_run import (
    ALL,
    Run,
    anchor_of,
    attest,
    join,
    latest_reason,
    leave,
    measure,
    members_by_replica,
    play_rounds,
    slot_of,
    started_and_attested,
)

A, B, C, D, E, F = ALL[:6]
PATIENCE = 2 * SETTLE_ROUNDS
"""Rounds before a change."""
WHOLE = memory_needed(spec_of(stages=2), StageRange(0, 2), 1, "cpu")
LITTLE = int(WHOLE * 0.8 / 0.9)


def auto(run: Run, peer: Keyed, **more: Any) -> None:
    run.accept(replace(peer.join(run.spec, **more), role=None))
    attest(run, peer)


def running(replicas: int, pipelines: int = 0, **more: Any) -> Run:
    return started_and_attested(replicas, pipelines, **more)


def changes(run: Run) -> list[tuple[str, Role]]:
    return [(event.peer, event.role) for event in run.events if isinstance(event, RoleChanged)]


def role_of(run: Run, peer: Keyed) -> Role:
    return run.state.peers[peer.peer].role


class TestToFullReplica:
    def run_with_a_waiting_peer(self, **more: Any) -> Run:
        """D has filled the vacancy of a pipeline whose other member is gone since."""
        run = running(1, 1, **more)
        leave(run, C)
        auto(run, D)
        assert (role_of(run, D), slot_of(run, D)) == (Role.STAGE, (1, 1))
        play_rounds(run, 2)
        leave(run, B)
        return run

    def test_a_stage_peer_that_waits_for_partners_becomes_a_full_replica(self) -> None:
        run = self.run_with_a_waiting_peer()
        play_rounds(run)
        waits_since = run.state.peers[D.peer].waits_since
        play_rounds(run, PATIENCE)
        assert not changes(run), "the round in which its partner was lost does not count"
        play_rounds(run)
        assert changes(run) == [(D.peer, Role.REPLICA)]
        assert run.state.reservations[D.peer].stages == StageRange(0, 2)
        assert f"it has waited for partners since round {waits_since}" in run.state.peers[D.peer].role_reason
        play_rounds(run, 2)
        assert members_by_replica(run) == {0: [A.peer], 2: [D.peer]}
        assert "is a full replica now: it has waited" in latest_reason(run)
        play_rounds(run, 20)
        assert len(changes(run)) == 1

    def test_a_peer_that_does_not_carry_the_whole_model_waits_on(self) -> None:
        run = running(1, 1)
        auto(run, D, memory_bytes=LITTLE)
        play_rounds(run, 6)
        assert (role_of(run, D), changes(run)) == (Role.STAGE, [])

    def test_a_peer_that_has_chosen_its_role_keeps_it(self) -> None:
        run = running(1, 1)
        join(run, D)
        play_rounds(run, 6)
        assert (role_of(run, D), changes(run)) == (Role.STAGE, [])

    def test_the_spares_that_the_run_keeps_stay_stage_peers(self) -> None:
        run = self.run_with_a_waiting_peer(grouping__spares=1)
        play_rounds(run, 6)
        assert not changes(run)

    def test_nothing_changes_when_the_run_is_nearly_over(self) -> None:
        run = self.run_with_a_waiting_peer(rounds=5)
        play_rounds(run, 3)
        assert not changes(run)


class TestToStagePeer:
    def run_with_a_lonely_stage_peer(self, *flexible: Keyed, **more: Any) -> Run:
        """A trains alone, and so do the `flexible` peers; D, a stage peer, waits for a partner."""
        run = running(1, 0, **more)
        for peer in flexible:
            auto(run, peer)
        play_rounds(run, 3)
        assert len(members_by_replica(run)) == 1 + len(flexible)
        join(run, D)
        return run

    def test_a_full_replica_completes_a_pipeline_that_waits_for_one_member(self) -> None:
        run = self.run_with_a_lonely_stage_peer(B)
        assert slot_of(run, D) == (2, 0)
        play_rounds(run, PATIENCE)
        assert not changes(run)
        play_rounds(run)
        assert changes(run) == [(B.peer, Role.STAGE)]
        assert slot_of(run, B) == (2, 1)
        assert members_by_replica(run) == {0: [A.peer]}
        assert "goes on without replica-1, since" in latest_reason(run)
        assert "is a stage peer now: replica-2 lacks only a peer for stage 1" in latest_reason(run)
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer]}, "it attested that round before it built its stage"
        play_rounds(run)
        assert members_by_replica(run) == {0: [A.peer], 2: [D.peer, B.peer]}
        play_rounds(run, 20)
        assert len(changes(run)) == 1

    def test_what_it_attests_before_it_hears_of_its_new_role_has_no_effect(self) -> None:
        run = self.run_with_a_lonely_stage_peer(B)
        play_rounds(run, PATIENCE + 2)
        last, known = run.state.current_round - 1, run.state.synced
        assert changes(run) == [(B.peer, Role.STAGE)]
        assert not run.accept(Attest(B.peer, 0, last, Part.STAGE, anchor_of(0, last)))
        assert run.state.synced == known

    def test_one_replica_has_to_train_on(self) -> None:
        run = running(1, 0)
        auto(run, B)
        play_rounds(run, 3)
        run.accept(Drain(A.peer, "a test"))
        play_rounds(run)
        leave(run, A)
        assert members_by_replica(run) == {1: [B.peer]}
        join(run, D)
        play_rounds(run, 8)
        assert not changes(run)

    def test_peers_that_have_chosen_to_be_full_replicas_stay_that(self) -> None:
        run = running(2, 0)
        join(run, D)
        play_rounds(run, 8)
        assert not changes(run)

    def test_a_chain_that_is_slower_than_the_replica_alone_is_not_formed(self) -> None:
        run = self.run_with_a_lonely_stage_peer(B)
        measure(run, B, 1e12, 1e9)
        measure(run, D, 1e9, 1e9)
        play_rounds(run, 8)
        assert not changes(run)

    def test_two_roles_do_not_alternate(self) -> None:
        run = self.run_with_a_lonely_stage_peer(B, rounds=400)
        since = []
        for _ in range(180):
            before = len(changes(run))
            play_rounds(run)
            if len(changes(run)) > before:
                since.append(run.state.current_round)
            # The partner leaves as soon as the pipeline trains, and comes back as soon as it does not.
            if role_of(run, B) is Role.STAGE and run.state.peers[D.peer].is_live:
                leave(run, D)
            elif role_of(run, B) is Role.REPLICA and not run.state.peers[D.peer].is_live:
                join(run, D)
        gaps = [later - earlier for earlier, later in pairwise(since)]
        assert len(since) >= 3
        assert gaps == sorted(gaps)
        assert gaps[-1] >= 2 * gaps[0]
