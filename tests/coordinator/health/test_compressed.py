"""What members measure changes the weights of the next plan, which says why; deadlines do not follow them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.health.compressed import measured_agreement
from coordinator.health.monitor import HealthMonitor
from coordinator.health.records import RoundFigures
from coordinator.rounds.phases import expected_seconds
from coordinator.state.commands import WeighCompressed
from coordinator.state.events import CompressedWeighed, RunRolledBack
from coordinator.state.state import CompressedWeight
from coordinator.status.messages import event_message
from protocol.algorithm.comparison import measured_position
from protocol.algorithm.compressed_weight import RECENT
from protocol.status import Measurement, PayloadAgreement
from tests.coordinator.health.rounds import PEERS, healthy
from tests.support.coordinator_run import (
    ALL,
    Run,
    latest_reason,
    leave,
    measure,
    play_round,
    play_rounds,
    started_and_attested,
)
from tests.support.incident_commands import implied_commands


def mixed(weights: str = "measured", **more: Any) -> Run:
    """Two full replicas and two pipelines, which all have a share of two microbatches."""
    return started_and_attested(2, 2, grouping__weights=weights, **more)


def weights(run: Run) -> list[float]:
    return [replica.weight for replica in run.state.plans[-1].replicas]


def weighings(run: Run) -> list[CompressedWeighed]:
    return [event for event in run.events if isinstance(event, CompressedWeighed)]


def test_the_next_plan_weighs_compressed_replicas_and_says_why() -> None:
    run = mixed()
    play_rounds(run, RECENT)
    assert len(run.state.plans) == 1
    run.accept(WeighCompressed(RECENT, 0.6))
    assert weights(run) == [1.0] * 4
    play_rounds(run)
    assert weights(run) == [1.0, 1.0, 0.625, 0.625]
    assert latest_reason(run) == (
        "compressed replicas weigh 0.625 beside full ones: their payloads agree with full ones 0.60 times as "
        "much as these with each other"
    )
    play_rounds(run, 2)
    assert len(run.state.plans) == 2, "a plan for each change only"


def test_a_weight_changes_in_steps_and_not_before_all_rounds_are_new() -> None:
    run = mixed()
    play_rounds(run, 3 * RECENT)
    run.accept(WeighCompressed(RECENT - 1, 0.1))
    run.accept(WeighCompressed(RECENT, 0.95))
    assert not weighings(run)
    run.accept(WeighCompressed(RECENT, 0.1))
    run.accept(WeighCompressed(2 * RECENT - 1, 0.1))
    run.accept(WeighCompressed(2 * RECENT, 0.1))
    assert [(each.round_number, each.weight) for each in weighings(run)] == [
        (RECENT, 0.5),
        (2 * RECENT, 0.25),
    ]
    assert run.state.compressed == CompressedWeight(2 * RECENT, 0.25, 0.1)
    assert "after round 5 compressed replicas weigh 0.5" in event_message(weighings(run)[0])


def test_a_run_with_equal_weights_takes_no_measurement() -> None:
    run = mixed("equal")
    play_rounds(run, RECENT)
    assert not run.accept(WeighCompressed(RECENT, 0.1))


def test_an_event_implies_the_command_that_led_to_it() -> None:
    run = mixed()
    play_rounds(run, RECENT)
    before, command = run.state, WeighCompressed(RECENT, 0.3)
    events = run.accept(command)
    assert next(implied_commands(before, events, {})) == command


def test_a_lower_weight_is_not_a_shorter_phase() -> None:
    run = mixed()
    for _ in range(RECENT):
        run.now += 20
        play_round(run)
    pipeline = run.state.plans[-1].replicas[2]
    before = expected_seconds(run.state, pipeline)
    assert before == 20
    run.accept(WeighCompressed(RECENT, 0.5))
    run.now += 20
    play_round(run)
    lighter = run.state.plans[-1].replicas[2]
    assert lighter.weight == 0.5
    assert expected_seconds(run.state, lighter) == before
    for _ in range(3):
        run.now += 20
        play_round(run)
    assert expected_seconds(run.state, lighter) == before
    play_round(run, done={2: 0.5})
    payload = next(
        entry.descriptor
        for entry in run.state.decisions[0, run.state.current_round - 1].entries
        if entry.descriptor.owner == lighter.members[0].peer
    )
    assert payload.weight == 0.25


def test_shares_of_the_work_and_weights_change_independently() -> None:
    run = mixed(grouping__balance=True, grouping__settle_rounds=1, inner__microbatches=4)
    play_rounds(run, RECENT)
    run.accept(WeighCompressed(RECENT, 0.5))
    for replica in run.state.plans[-1].replicas:
        for member in replica.members:
            peer = next(each for each in ALL if each.peer == member.peer)
            measure(run, peer, 4e9 if replica.index < 2 else 1e9)
    play_rounds(run, 3)
    plan = run.state.plans[-1]
    work = [run.spec.microbatches_of(each) / 4 for each in plan.replicas]
    assert work[0] > 1.0
    assert [each.weight for each in plan.replicas] == [work[0], work[1], work[2] / 2, work[3] / 2]


def test_the_monitor_tells_the_agreement_of_compressed_payloads_with_full_ones() -> None:
    run = mixed()
    monitor = HealthMonitor(run.state)
    told = []
    for round_number in range(1, RECENT + 2):
        play_round(run)
        for measurement in measurements(run, round_number):
            monitor.record(measurement)
        told += [judgement.agreement for judgement in monitor.judge(run.state)]
    assert told == [None] * (RECENT - 1) + [0.25, 0.25]


def measurements(run: Run, round_number: int) -> list[Measurement]:
    """Full payloads have a cosine of 0.2 with each other, and of 0.05 with others."""
    found = []
    for replica in run.state.plan_for(round_number).replicas:
        for position, member in enumerate(replica.members):
            agreements = []
            for stage in member.stages:
                owners = [
                    entry.descriptor.owner for entry in run.state.decisions[stage, round_number].entries
                ]
                owner = owners[measured_position(owners, member.peer) or 0]
                agreements.append(PayloadAgreement(stage, owner, 0.1, 1.0, 0.5, alike=0.2, unlike=0.05))
            found.append(
                Measurement(
                    *(member.peer, round_number, replica.index, position), agreements=tuple(agreements)
                )
            )
    return found


def test_only_recent_rounds_of_full_and_compressed_payloads_count() -> None:
    rounds = healthy(RECENT)
    assert measured_agreement(rounds[1:]) is None
    assert measured_agreement(rounds) is None, "no payload is of a compressed replica"


def with_compressed(count: int, dense_every: int = 0, late: int = 0) -> list[RoundFigures]:
    """Payloads without bias: all pairs of a round have the same cosine, a higher one in dense rounds.

    Replicas 0 and 1 are full, the others compressed. In round `late` the payload of replica 1 is missing.
    """
    rounds = []
    for each in healthy(count):
        is_dense = dense_every > 0 and each.round_number % dense_every == 0
        alone, cosine = each.round_number == late, 0.45 if is_dense else 0.1
        payloads = [
            replace(
                payload,
                alike=None if alone and payload.is_full else cosine,
                unlike=cosine,
                is_compressed=not payload.is_full,
            )
            for payload in each.payloads
            if not (alone and payload.owner == PEERS[1])
        ]
        rounds.append(replace(each, payloads=tuple(payloads), is_dense=is_dense))
    return rounds


@pytest.mark.parametrize("late", range(13))
@pytest.mark.parametrize("dense_every", [0, 2, 4])
def test_dense_rounds_are_not_mixed_with_others(dense_every: int, late: int) -> None:
    for count in range(1, 13):
        agreement = measured_agreement(with_compressed(count, dense_every, late))
        assert agreement is None or agreement == pytest.approx(1.0)
    assert measured_agreement(with_compressed(11, dense_every, late)) is not None


def test_no_round_is_measured_for_two_changes() -> None:
    rounds = with_compressed(2 * RECENT)
    assert measured_agreement(rounds, since=RECENT) is not None
    assert measured_agreement(rounds[:-1], since=RECENT) is None
    gaps = [*rounds[:RECENT], rounds[-1]]
    assert measured_agreement(gaps, since=RECENT) is None, "one round is new"


def test_the_monitor_measures_no_round_for_two_changes() -> None:
    run = mixed()
    monitor = HealthMonitor(run.state)
    changes = []

    def play() -> None:
        round_number = run.state.current_round
        play_round(run)
        for measurement in measurements(run, round_number):
            monitor.record(measurement)
        for judgement in monitor.judge(run.state):
            if judgement.agreement is not None:
                run.accept(WeighCompressed(judgement.round_number, judgement.agreement))
        changes[:] = [each.round_number for each in weighings(run)]

    for _ in range(RECENT + 3):
        play()
    assert changes == [RECENT]
    play_round(run)  # its decision is a rollback, which undoes the rounds after the fifth
    monitor.note(RunRolledBack(run.now, RECENT + 4, RECENT, "operator", ()))
    for _ in range(RECENT - 1):
        play()
    assert changes == [RECENT]
    play()
    assert changes == [RECENT, 2 * RECENT + 4]


def test_with_one_full_replica_weights_are_those_of_the_work_and_the_plan_says_so() -> None:
    run = mixed()
    play_rounds(run, RECENT)
    run.accept(WeighCompressed(RECENT, 0.5))
    play_rounds(run)
    assert weights(run) == [1.0, 1.0, 0.5, 0.5]
    leave(run, ALL[1])
    play_rounds(run, 2)
    assert weights(run) == [1.0] * 3
    assert "weigh 1 beside full ones, not 0.5 as measured" in latest_reason(run)


def test_replicas_that_weigh_little_still_raise_an_alarm_together() -> None:
    """Three pipelines of five replicas diverge; they weigh a quarter each."""
    run = started_and_attested(2, 3, grouping__weights="measured", rounds=60)
    monitor, alarms = HealthMonitor(run.state), []
    for round_number in range(1, 16):
        if round_number in (RECENT + 1, 2 * RECENT + 1):
            run.accept(WeighCompressed(round_number - 1, 0.1))
        play_round(run)
        for replica in run.state.plan_for(round_number).replicas:
            diverges = round_number > 13 and not replica.is_full
            for position, member in enumerate(replica.members):
                place = member.peer, round_number, replica.index, position
                loss = 30.0 if diverges else 3.0
                is_last = position == len(replica.members) - 1
                monitor.record(Measurement(*place, validation_loss=loss, complete=is_last))
        alarms += [each.alarm for each in monitor.judge(run.state) if each.alarm]
    assert weights(run) == [1.0, 1.0, 0.25, 0.25, 0.25]
    assert alarms
