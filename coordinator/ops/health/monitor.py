"""Collects what members measure, and judges each round once.

A round is judged when all of its members have measured it, or when the next round is decided: a member that
never answers delays no alarm for long. While an alarm lasts, rounds are still compared with
those before it, and no further alarm is raised. It is over after CALM_ROUNDS rounds in a row without a reason
for one, after WINDOW rounds (then the new level counts as usual), or with a rollback.

After a restart of the coordinator, the rounds to compare with come from the measurements of its file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from coordinator.ops.health.figures import MeasuredRound, measured_round
from coordinator.ops.health.judge import WINDOW, Judgement, judge, summary
from coordinator.run.state.events import Event, RunRolledBack
from coordinator.run.state.state import State
from protocol.status import HealthFinding, Measurement, TrainingHealth
from protocol.types import PeerId

CALM_ROUNDS = 3


class HealthMonitor:
    """The health of one run.

    Args:
        state: at the start. Rounds that are decided in it are not judged any more.

    Attributes:
        latest: of the newest round that was judged; None before any.
    """

    def __init__(self, state: State) -> None:
        self._next = max(1, state.rounds_decided)
        self._open: dict[int, dict[PeerId, Measurement]] = defaultdict(dict)
        self._rounds: list[MeasuredRound] = []
        self._alarmed_in = 0 if state.alarm is None else state.alarm.round_number
        self._calm = 0
        self._told: set[tuple[object, ...]] = set()
        self.latest: TrainingHealth | None = None

    def resume(self, state: State, measurements: Iterable[Measurement]) -> None:
        """Take in what was measured before a restart: rounds that are over are what others are compared with.

        Args:
            measurements: those of the last rounds, believed then. Their order does not matter.
        """
        measured: dict[int, dict[PeerId, Measurement]] = defaultdict(dict)
        for each in measurements:
            self.record(each)  # if its round is still open
            measured[each.round_number].setdefault(each.peer, each)
        former = [number for number in sorted(measured) if 0 < number < self._next][-2 * WINDOW :]
        if former and former[0] < self._alarmed_in:
            self._alarmed_in = 0  # its round is judged again
        rollbacks = (each for each in state.restored if former and former[0] < each < self._next)
        for round_number in sorted({*former, *rollbacks}):
            if round_number in state.restored:
                self._forget(round_number, state.restored[round_number])
            else:
                self._judge(measured_round(state, round_number, measured[round_number]))

    def record(self, measurement: Measurement) -> None:
        """Take in a measurement that is believed (coordinator.api.measuring)."""
        if measurement.round_number >= self._next:
            self._open[measurement.round_number].setdefault(measurement.peer, measurement)

    def judge(self, state: State) -> Iterator[Judgement]:
        """The rounds that can be judged now, each once. An `alarm` that is set is a new one."""
        while self._next < state.current_round or self._next in self._open:
            round_number = self._next
            is_over = state.rounds_decided > round_number
            if not is_over and not self._is_measured(state, round_number):
                return
            self._next += 1
            found = self._open.pop(round_number, None)
            if found is not None:
                yield self._judge(measured_round(state, round_number, found))

    def note(self, event: Event) -> None:
        """Take in an event: after a rollback, the rounds that it undoes are no longer what is usual."""
        if isinstance(event, RunRolledBack):
            self._forget(event.round_number, event.restore_round)
            self._open.clear()
            # The round that restores has no figures of its own.
            self._next = event.round_number + 1

    def _forget(self, round_number: int, restore_round: int) -> None:
        """Round `round_number` restores the anchors after `restore_round`."""
        self._rounds = [each for each in self._rounds if each.round_number <= restore_round]
        self._alarmed_in = self._calm = 0

    def _judge(self, figures: MeasuredRound) -> Judgement:
        judgement = judge([*self._rounds, figures])
        has_reason, is_new = bool(judgement.alarm), not self._alarmed_in
        if self._alarmed_in:
            self._calm = 0 if has_reason else self._calm + 1
            is_old = figures.round_number >= self._alarmed_in + WINDOW
            if is_old:
                self._rounds = []
            if self._calm >= CALM_ROUNDS or is_old:
                self._alarmed_in = self._calm = 0
        elif has_reason:
            self._alarmed_in = figures.round_number
        # Rounds of an alarm would make it look usual.
        if not self._alarmed_in:
            self._rounds = [*self._rounds, figures][-WINDOW:]
        self.latest = summary(figures, judgement)
        news = tuple(each for each in judgement.findings if _subject(each) not in self._told)
        self._told = {_subject(each) for each in judgement.findings}
        findings = judgement.findings
        if not is_new:
            findings = tuple(replace(each, raises_alarm=False) for each in findings)
        return replace(judgement, findings=findings, news=news)

    def _is_measured(self, state: State, round_number: int) -> bool:
        """Whether every member that takes part has measured the round."""
        if not state.plans or round_number not in self._open:
            return False
        epoch, measured = state.plan_for(round_number).epoch, self._open[round_number]
        members = state.assignments.get(epoch, {}).keys() - state.absent.get(epoch, frozenset())
        return members <= measured.keys()


def _subject(finding: HealthFinding) -> tuple[object, ...]:
    return finding.sign, finding.peers, finding.of_run
