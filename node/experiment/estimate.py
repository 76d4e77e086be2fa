"""How long what is left of an experiment will take, from what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from node.experiment.results import Result
from node.experiment.trial import Trial
from protocol.errors import HetnodeError


class Pace:
    """Seconds per inner step, by what a step consists of."""

    def __init__(self, results: Iterable[Result] = ()) -> None:
        self._seconds: dict[Hashable, float] = defaultdict(float)
        self._steps: dict[Hashable, int] = defaultdict(int)
        for result in results:
            try:
                trial = result.trial
            except (HetnodeError, ValueError):  # of another version
                continue
            self.learn(trial, result.rounds, result.seconds)

    def learn(self, trial: Trial, rounds: int, seconds: float) -> None:
        """Record how long some rounds of `trial` took."""
        for kind in _kinds(trial):
            self._seconds[kind] += seconds
            self._steps[kind] += rounds * trial.spec.inner.steps

    def seconds_of(self, trial: Trial, rounds: int) -> float | None:
        """Seconds for these rounds of `trial`; None if no similar trial was ever measured."""
        for kind in _kinds(trial):
            if self._steps[kind]:
                return rounds * trial.spec.inner.steps * self._seconds[kind] / self._steps[kind]
        return None

    def left(self, rounds_left: Sequence[tuple[Trial, int]], jobs: int) -> float | None:
        """Seconds until these workers have done all trials; None if it is not known."""
        each = [self.seconds_of(trial, rounds) for trial, rounds in rounds_left]
        known = [seconds for seconds in each if seconds is not None]
        if len(known) < len(each):
            return None
        return max(sum(known) / jobs, *known) if known else 0.0


def _kinds(trial: Trial) -> tuple[Hashable, Hashable]:
    """What steps of unlike length differ in; without the links first where nothing so like is known."""
    spec = trial.spec
    work = (spec.model, spec.swarm.stages, spec.inner.microbatches, spec.inner.microbatch_size)
    replicas = spec.swarm.replicas + spec.swarm.pipelines
    return (
        (work, spec.swarm.replicas, spec.swarm.pipelines, spec.inner.steps, trial.variation),
        (work, replicas, spec.inner.steps > 1),
    )
