"""Swarms whose stages exchange in turn: who is due commits, others lose nothing, all anchors agree."""

from __future__ import annotations

import pytest

from coordinator.run.state.events import PeerLost
from coordinator.run.state.tokens import payload_tokens
from protocol.math.turns import is_due
from protocol.types import Skipped
from tests.builders import decisions_in
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.overlap import LOSSLESS, Records, assert_balanced
from tests.virtual.scenario import (
    FULL,
    MIXED,
    SPARSE,
    Play,
    deny_payloads,
    restart_coordinator,
    return_after,
    roll_back_and_resume,
)
from tests.virtual.swarm import VirtualSwarm

TURNS = {"outer.turns": 2, "outer.overlap": 1}


def assert_turns(swarm: VirtualSwarm) -> None:
    """Each stage was committed in its rounds and the last one, and was skipped in the others."""
    skipped = decisions_in(swarm.events, Skipped)
    for stage in range(swarm.spec.swarm.stages):
        due = [number for number in swarm.rounds if is_due(swarm.spec, stage, number)]
        assert swarm.committed(stage) == due
        found = [each.round_number for each in skipped if each.stage == stage]
        assert found == [number for number in swarm.rounds if number not in due]


def test_full_and_pipeline_replicas_exchange_the_stages_in_turn(play: Play) -> None:
    swarm = play.to_the_end(None, MIXED, rounds=5, **TURNS)
    assert_turns(swarm)
    state = swarm.state
    assert (state.aborted, state.silences) == (0, {})
    embeddings = {swarm.trainer(name).outer.embedding_digest() for name in MIXED}
    assert len(embeddings) == 1, "members without stage 0 follow it"
    # The progress of all rounds is exchanged once, and counts once.
    [decision] = [each for each in swarm.decisions if (each.stage, each.round_number) == (0, 5)]
    in_round = 0
    for payload in (entry.descriptor for entry in decision.entries):
        replica = state.plans[-1].replica_of(payload.owner)
        assert replica is not None
        in_round += payload_tokens(swarm.spec, replica, payload)
    assert state.tokens == swarm.spec.rounds * in_round


def test_who_is_killed_comes_back_by_replay(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", 0, 4, Moment.DECIDED, Action.KILL)
    assert_turns(play.to_the_end(lambda swarm: return_after(swarm, "b", 6), rounds=8, **TURNS))


def test_an_aborted_round_of_a_due_stage_loses_nothing(
    play: Play, plan: FaultPlan, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny_payloads(plan, monkeypatch, stage=1, round_number=3)
    swarm = play.to_the_end(**TURNS, **SPARSE, **LOSSLESS)
    assert (swarm.committed(0), swarm.committed(1)) == ([2, 4, 6], [1, 5, 6])
    assert swarm.state.aborted == 1
    assert_balanced(swarm, records, *FULL)


@pytest.mark.parametrize(
    "moment",
    [
        Moment.MATCHED,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Moment.PROPOSED, Moment.GATHERED)),
    ],
)
def test_a_coordinator_that_is_killed_in_a_turn_decides_it_when_it_is_back(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("a", 1, 3, moment, Action.DELAY, seconds=0.0)
    swarm = play.to_the_end(lambda swarm: restart_coordinator(swarm, "a"), **TURNS)
    assert {1, 5, 6} <= {*swarm.committed(1)}
    assert swarm.committed(0) == [2, 4, 6]
    assert not swarm.happened(PeerLost)


def test_a_rollback_is_one_of_all_stages(play: Play) -> None:
    swarm = play.to_the_end(
        lambda swarm: roll_back_and_resume(swarm, 5, 2),
        MIXED,
        rounds=7,
        **TURNS,
        **{"recovery.checkpoint_every": 1},
    )
    assert (swarm.committed(0), swarm.committed(1)) == ([2, 4, 6, 7], [1, 3, 7])
    assert swarm.state.aborted == 0
