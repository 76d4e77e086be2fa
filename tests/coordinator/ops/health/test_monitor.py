"""Each round is judged once, an alarm is raised once, and it pauses the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from coordinator.ops.health.judge import WINDOW, Judgement
from coordinator.ops.health.monitor import HealthMonitor
from coordinator.run.state.commands import RaiseAlarm, ResumeRun
from coordinator.run.state.events import AlarmRaised, RunPaused, RunRolledBack
from coordinator.status.messages import event_message
from coordinator.status.run_status import run_status
from protocol.status import CauseCode, Measurement, PayloadAgreement
from protocol.types import PausedBy
from tests.support.coordinator_run import play_round, started_and_attested

BAD = 30.0


class Watched:
    """A run of three full replicas whose members measure each round with the losses that a test says."""

    def __init__(self, rounds: int = 60) -> None:
        self.run = started_and_attested(3, rounds=rounds)
        self.monitor = HealthMonitor(self.run.state)
        self.judged: list[Judgement] = []
        self.measured: list[Measurement] = []

    def measure(self, round_number: int, losses: dict[int, float], silent: int | None = None) -> None:
        state = self.run.state
        for replica in state.plan_for(round_number).replicas:
            if replica.index == silent:
                continue
            (member,) = replica.members
            entries = state.decisions[0, round_number].entries
            owners = [entry.descriptor.owner for entry in entries]
            owner = owners[(owners.index(member.peer) + 1) % len(owners)]
            measurement = Measurement(
                *(member.peer, round_number, replica.index, 0),
                validation_loss=losses.get(replica.index, 3.0),
                complete=True,
                progress_norm=1.0,
                error_norm=1.0,
                agreements=(PayloadAgreement(0, owner, 0.1 + 0.01 * replica.index, 1.0, 0.5, 0.2, None),),
            )
            self.measured.append(measurement)
            self.monitor.record(measurement)

    def restart(self, restored: Mapping[int, int] | None = None) -> None:
        """The coordinator starts again, and reads what was measured.

        Args:
            restored: the rounds that are rollbacks, and those that they restore.
        """
        state = replace(self.run.state, restored=restored or {})
        self.monitor = HealthMonitor(state)
        self.monitor.resume(state, self.measured)

    def play(self, count: int = 1, losses: dict[int, float] | None = None) -> None:
        for _ in range(count):
            round_number = self.run.state.current_round
            play_round(self.run)
            self.measure(round_number, losses or {})
            self.judged += self.judge()

    def judge(self) -> Iterator[Judgement]:
        """As coordinator.app does with ``--alarm pause``."""
        for judgement in self.monitor.judge(self.run.state):
            if judgement.alarm:
                alarm = judgement.round_number, judgement.last_healthy, judgement.alarm
                self.run.accept(RaiseAlarm(*alarm, pauses=True))
            yield judgement

    @property
    def alarms(self) -> list[AlarmRaised]:
        return [event for event in self.run.events if isinstance(event, AlarmRaised)]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_each_round_is_judged_once_and_summed_up(watched: Watched) -> None:
    watched.play(3)
    assert [each.round_number for each in watched.judged] == [1, 2, 3]
    assert not list(watched.judge())
    health = watched.monitor.latest
    assert health is not None
    assert (health.round_number, health.findings, health.error_share) == (3, (), 0.5)
    (stage,) = health.stages
    assert (stage.payloads, stage.cosine, stage.least_cosine) == (3, pytest.approx(0.11), 0.1)
    assert (stage.full_cosine, stage.pipeline_cosine) == (pytest.approx(0.11), None)
    assert (stage.alike, stage.unlike, stage.norm, stage.mean_norm) == (pytest.approx(0.2), None, 1.0, 0.5)


def test_a_round_waits_for_its_members_until_the_next_is_decided(watched: Watched) -> None:
    play_round(watched.run)
    watched.measure(1, {}, silent=2)
    assert not list(watched.judge())
    play_round(watched.run)
    assert [each.round_number for each in watched.judge()] == [1]
    watched.measure(1, {})
    assert not list(watched.judge()), "it is over"


def test_an_alarm_is_raised_once_and_pauses_the_run_and_not_again_after_resume(
    watched: Watched,
) -> None:
    watched.play(8)
    watched.play(1, dict.fromkeys(range(3), BAD))
    (alarm,) = watched.alarms
    assert (alarm.round_number, alarm.last_healthy) == (9, 8)
    assert [(event.by, event.reason) for event in watched.run.events if isinstance(event, RunPaused)] == [
        (PausedBy.ALARM, alarm.reason)
    ]
    (finding,) = watched.judged[-1].findings
    assert (finding.value, finding.usual, finding.replicas) == (BAD, 3.0, (0, 1, 2))
    status = run_status(watched.run.state, (), watched.run.now, 0.0, health=watched.monitor.latest)
    assert status.alarm is not None
    assert (status.alarm.code, status.alarm.count) == (CauseCode.ALARM, 8)
    watched.run.accept(ResumeRun())
    assert not run_status(watched.run.state, (), watched.run.now, 0.0).alarm
    watched.play(WINDOW // 2, dict.fromkeys(range(3), 2 * BAD))
    assert watched.alarms == [alarm]
    assert watched.run.state.pause is None


def test_after_calm_rounds_the_next_alarm_is_raised(watched: Watched) -> None:
    watched.play(8)
    for _ in range(2):
        watched.play(1, dict.fromkeys(range(3), BAD))
        watched.run.accept(ResumeRun())
        watched.play(4)
    assert [alarm.round_number for alarm in watched.alarms] == [9, 14]
    assert [alarm.last_healthy for alarm in watched.alarms] == [8, 13]


def test_a_level_to_which_a_run_has_got_used_is_usual(watched: Watched) -> None:
    watched.play(8)
    high = dict.fromkeys(range(3), 5.0)
    watched.play(1, high)
    watched.run.accept(ResumeRun())
    watched.play(WINDOW + 8, high)
    assert len(watched.alarms) == 1
    assert not watched.judged[-1].findings


def test_a_loss_that_is_worse_than_no_model_is_never_usual(watched: Watched) -> None:
    watched.play(8)
    for _ in range(2):
        watched.play(1, dict.fromkeys(range(3), BAD))
        watched.run.accept(ResumeRun())
        watched.play(WINDOW, dict.fromkeys(range(3), BAD))
        watched.run.accept(ResumeRun())
    assert len(watched.alarms) > 1


def test_one_bad_replica_raises_no_alarm(watched: Watched) -> None:
    watched.play(8)
    watched.play(3, {1: BAD})
    assert not watched.alarms
    assert watched.judged[-1].findings[0].replicas == (1,)
    assert [len(each.news) for each in watched.judged[-3:]] == [1, 0, 0], "it is logged once"


def test_a_restarted_coordinator_does_not_raise_a_known_alarm_again(watched: Watched) -> None:
    watched.play(8)
    watched.play(1, dict.fromkeys(range(3), float("nan")))
    watched.run.accept(ResumeRun())
    watched.monitor = HealthMonitor(watched.run.state)
    watched.play(2, dict.fromkeys(range(3), float("nan")))
    assert len(watched.alarms) == 1


def test_a_restarted_coordinator_compares_with_the_rounds_before(watched: Watched) -> None:
    watched.play(8)
    watched.restart()
    watched.play(1, dict.fromkeys(range(3), BAD))
    assert [(alarm.round_number, alarm.last_healthy) for alarm in watched.alarms] == [(9, 8)]
    watched.run.accept(ResumeRun())
    watched.restart()
    watched.play(2, dict.fromkeys(range(3), BAD))
    assert len(watched.alarms) == 1, "the alarm lasts"
    watched.play(3)
    watched.restart()
    watched.play(1, dict.fromkeys(range(3), BAD))
    assert [alarm.round_number for alarm in watched.alarms] == [9, 15]


def test_after_a_restart_the_rounds_that_a_rollback_undid_are_not_usual(watched: Watched) -> None:
    watched.play(8)
    watched.play(1, dict.fromkeys(range(3), BAD))
    watched.run.accept(ResumeRun())
    watched.play(5, dict.fromkeys(range(3), BAD))
    watched.restart(restored={13: 8})
    watched.play(1, dict.fromkeys(range(3), BAD))
    assert [(alarm.round_number, alarm.last_healthy) for alarm in watched.alarms] == [(9, 8), (14, 8)]


def test_a_rollback_ends_the_alarm_and_forgets_its_rounds(watched: Watched) -> None:
    watched.play(8)
    watched.play(1, dict.fromkeys(range(3), BAD))
    watched.monitor.note(RunRolledBack(0.0, watched.run.state.rounds_decided, 8, "", ()))
    watched.run.accept(ResumeRun())
    watched.play(3)
    assert not watched.judged[-1].findings
    watched.play(1, dict.fromkeys(range(3), BAD))
    assert len(watched.alarms) == 2


def test_an_alarm_that_only_warns_does_not_pause(watched: Watched) -> None:
    watched.play(2)
    watched.run.accept(RaiseAlarm(2, 1, "Round 2: the loss rose.", pauses=False))
    assert len(watched.alarms) == 1
    assert watched.run.state.pause is None
    watched.run.accept(RaiseAlarm(2, 1, "again", pauses=True))
    assert len(watched.alarms) == 1
    assert watched.run.state.pause is None


def test_an_alarm_without_a_healthy_round_offers_none(watched: Watched) -> None:
    watched.play(1, dict.fromkeys(range(3), float("inf")))
    (alarm,) = watched.alarms
    assert alarm.last_healthy == 0
    assert "rollback" not in event_message(alarm)
