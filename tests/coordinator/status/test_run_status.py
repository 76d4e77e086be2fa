"""The status that the coordinator builds of its state: replicas, peers, health, alarms, pauses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from coordinator.base.phrases import short
from coordinator.run.state.commands import Leave, PauseRun, RaiseAlarm, Start
from coordinator.status.cause_text import cause_text, status_text
from coordinator.status.messages import run_message, stall_message
from coordinator.status.run_status import replica_figures, run_status
from protocol.status import (
    Cause,
    CauseCode,
    Measurement,
    PeerActivity,
    Place,
    ReplicaState,
    ReplicaStatus,
    RunPhase,
    RunStatus,
)
from protocol.types import Lifecycle, Pause, PausedBy, PeerId, Role, StageRange
from tests.builders import keyed, spec_of, status_of
from tests.support.coordinator_run import (
    Run,
    codes_of,
    offer,
    play_round,
    play_rounds,
    started,
    started_and_attested,
)

A, B, C = (keyed(i) for i in range(3))


def status_after(run: Run, *measurements: Measurement, resting: Collection[PeerId] = ()) -> RunStatus:
    return run_status(run.state, measurements, run.now, run.now, resting)


def replicas_of(run: Run, *measurements: Measurement) -> dict[int, ReplicaStatus]:
    return {each.index: each for each in status_after(run, *measurements).replicas}


def measured(**changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "peer": A.peer,
        "round_number": 1,
        "replica": 0,
        "position": 0,
        "validation_loss": 5.0,
        "train_loss": 5.5,
        "tokens": 1000,
        "inner_seconds": 3.0,
        "outer_seconds": 1.0,
        "complete": True,
    }
    return Measurement(**(fields | changes))


def test_the_run_as_a_whole() -> None:
    run = started(2, rounds=5)
    play_round(run)
    status = status_after(run, measured(), measured(peer=B.peer, replica=1, validation_loss=4.0))
    assert (status.round_number, status.rounds_decided) == (2, 1)
    assert (status.stage_rounds_committed, status.tokens_committed) == (2, run.state.tokens)
    assert (status.validation_loss, status.tokens_per_second) == (4.5, 500)
    assert status.remaining_seconds is not None
    assert status.activities == {"trains": 2}
    assert [each.state for each in status.replicas] == [ReplicaState.TRAINS] * 2
    assert status.cause == Cause(CauseCode.TRAINING, round_number=2, total=5)


def test_a_replica_says_what_it_does_in_the_open_round() -> None:
    run = started(2)
    for stage in range(2):
        offer(run, A, A.payload(run.spec, stage, 1))
    found = replicas_of(run)
    assert (found[0].state, found[0].progress) == (ReplicaState.OFFERED, 1.0)
    assert (found[1].state, found[1].progress) == (ReplicaState.TRAINS, 0.0)
    assert status_after(run).cause.code is CauseCode.OFFERS_LACKING
    for stage in range(2):
        offer(run, B, B.payload(run.spec, stage, 1))
    assert {each.state for each in replicas_of(run).values()} == {ReplicaState.EXCHANGES}
    assert status_after(run).cause.code is CauseCode.REPORTS_LACKING


def test_a_lost_member_breaks_its_replica() -> None:
    run = started(1, pipelines=1)
    run.accept(Leave(B.peer, "a test"))
    broken = replicas_of(run)[1]
    assert broken.state is ReplicaState.BROKEN
    assert CauseCode.MEMBER_GONE in codes_of(broken.cause)
    assert [each.peer for each in broken.places] == [B.peer, C.peer]
    assert status_after(run).activities["gone"] == 1
    assert status_after(run).replicas_broken == 1


def test_a_member_whose_owner_has_paused_it_is_not_called_gone() -> None:
    run = started(1, pipelines=1)
    run.accept(Leave(B.peer, "drained"))
    broken = status_after(run, resting={B.peer}).replicas[1].cause
    assert broken is not None
    assert "paused on its machine" in cause_text(broken)
    run.accept(Leave(A.peer, "no power"))
    told = run_message(run.state, {B.peer})
    assert f"{short(B.peer)} (stage 0), which is paused on its machine" in told
    assert f"{short(A.peer)} (stages 0-1), which is gone" in told
    assert stall_message(run.state, {B.peer}) == told == status_text(status_after(run, resting={B.peer}))


def test_a_replica_in_no_plan_is_told_with_what_it_lacks() -> None:
    run = started(2, pipelines=1)
    run.accept(Leave(keyed(3).peer, "a test"))
    play_round(run)
    waiting = replicas_of(run)[2]
    assert not waiting.is_planned
    assert waiting.places[0] == Place(StageRange(0, 1), C.peer)
    assert waiting.state is ReplicaState.BROKEN
    assert status_after(run).replicas_planned == 2


def test_before_the_first_plan_there_is_no_replica() -> None:
    run = Run(spec_of(2, 1, 1))
    run.accept(Start())
    run.accept(A.join(run.spec, Role.STAGE))
    status = status_after(run)
    assert (status.phase, status.replicas, status.round_number) == (RunPhase.GATHERING, (), 0)
    assert status.cause.code is CauseCode.PEERS_LACKING
    assert [(each.role, each.count) for each in status.cause.causes] == [(Role.STAGE, 1), (Role.REPLICA, 1)]


def test_a_replaced_member_no_longer_counts_in_its_replica() -> None:
    last = measured(position=1, replica=1, round_number=9, link_bytes_sent=1)
    first = replace(last, position=0, complete=False, link_bytes_sent=10)
    (figures,) = replica_figures([first, replace(first, round_number=5, link_bytes_sent=500), last]).values()
    assert (figures.members, figures.link_bytes_sent) == (2, 11)
    assert not replica_figures([first])


def test_an_alarm_a_pause_and_its_end() -> None:
    run = started_and_attested(2, rounds=9)
    assert (status_after(run).alarm, status_after(run).pause, status_after(run).rollbacks) == (None, None, ())
    play_rounds(run, 2)
    run.accept(RaiseAlarm(2, 1, "the loss rose", True))
    status = status_after(run)
    assert status.alarm == Cause(CauseCode.ALARM, round_number=2, count=1, detail="the loss rose")
    assert status.pause is not None
    assert (status.pause.by, status.is_held) == (PausedBy.ALARM, False)
    play_round(run)
    assert status_after(run).cause.code is CauseCode.PAUSED
    assert status_after(run).is_held


def test_a_pause_of_the_operator() -> None:
    run = started_and_attested(2, rounds=9)
    run.accept(PauseRun(PausedBy.OPERATOR, "the loss has risen"))
    assert status_after(run).pause == Pause(2, PausedBy.OPERATOR, "the loss has risen")


@pytest.mark.parametrize(
    ("changes", "activity"),
    [
        ({}, PeerActivity.TRAINS),
        ({"lifecycle": Lifecycle.SYNCING}, PeerActivity.FOLLOWS),
        ({"lifecycle": Lifecycle.READY, "assignment": ""}, PeerActivity.SPARE),
        ({"lifecycle": Lifecycle.DRAINING}, PeerActivity.DRAINS),
        ({"lifecycle": Lifecycle.GONE}, PeerActivity.GONE),
        ({"lifecycle": Lifecycle.GONE, "rests": True}, PeerActivity.RESTS),
        ({"role": Role.RELAY, "lifecycle": Lifecycle.READY}, PeerActivity.RELAY),
    ],
)
def test_the_word_for_what_a_peer_does(changes: dict[str, Any], activity: PeerActivity) -> None:
    assert replace(status_of().peers[0], **changes).activity is activity
