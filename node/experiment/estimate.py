"""The remaining time of an experiment, estimated from finished rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from node.experiment.results import Result
from node.experiment.trial import Trial
from protocol.errors import HetnodeError


class Pace:
    """Seconds per inner step, for each kind of trial."""

    def __init__(self, results: Iterable[Result] = ()) -> None:
        self._seconds: dict[Hashable, float] = defaultdict(float)
        self._steps: dict[Hashable, int] = defaultdict(int)
        for result in results:
            try:
                trial = result.trial
            except (HetnodeError, ValueError):  # written by another version
                continue
            self.learn(trial, result.rounds, result.seconds)

    def learn(self, trial: Trial, rounds: int, seconds: float) -> None:
        """Record that `rounds` of `trial` took `seconds`."""
        for kind in _kinds(trial):
            self._seconds[kind] += seconds
            self._steps[kind] += rounds * trial.spec.inner.steps

    def seconds_of(self, trial: Trial, rounds: int) -> float | None:
        """Seconds for `rounds` of `trial`; None if no similar trial was measured."""
        for kind in _kinds(trial):
            if self._steps[kind]:
                return rounds * trial.spec.inner.steps * self._seconds[kind] / self._steps[kind]
        return None

    def left(self, rounds_left: Sequence[tuple[Trial, int]], jobs: int) -> float | None:
        """Seconds until `jobs` workers have finished all trials; None if it is unknown for one of them."""
        each = [self.seconds_of(trial, rounds) for trial, rounds in rounds_left]
        known = [seconds for seconds in each if seconds is not None]
        if len(known) < len(each):
            return None
        return max(sum(known) / jobs, *known) if known else 0.0


def _kinds(trial: Trial) -> tuple[Hashable, Hashable]:
    """The properties that determine the time of a step: first all of them, then without the links."""
    spec = trial.spec
    work = (spec.model, spec.swarm.stages, spec.inner.microbatches, spec.inner.microbatch_size)
    replicas = spec.swarm.replicas + spec.swarm.pipelines
    return (
        (work, spec.swarm.replicas, spec.swarm.pipelines, spec.inner.steps, trial.variation),
        (work, replicas, spec.inner.steps > 1),
    )
