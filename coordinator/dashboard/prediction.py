"""What the cost model predicts of the newest plan: the step of each replica, and the bytes of each link.

Only a new plan or new measurements of peers change it, and a large swarm takes a second, so it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from coordinator.dashboard.view import RunView
from coordinator.placement.cost_model import bottleneck, chain_costs, message_bytes
from coordinator.placement.schedule import StepTime, step_time
from protocol.types import Replica


@dataclass(frozen=True)
class LinkBytes:
    """Bytes on one link in one round."""

    downstream: int
    upstream: int

    @property
    def total(self) -> int:
        return self.downstream + self.upstream


@dataclass(frozen=True)
class ReplicaPrediction:
    """One replica in one round.

    Attributes:
        step: one inner step.
        bottleneck: what the step waits for most, such as "uplink of ..cd"; "" where nothing is measured.
        links: bytes of the inner phase on each link.
    """

    step: StepTime
    bottleneck: str
    links: tuple[LinkBytes, ...]

    def inner_seconds(self, steps: int) -> float:
        return steps * self.step.seconds


class Predictions:
    """Predicts the replicas of the newest plan; one object serves one run."""

    def __init__(self) -> None:
        self._of: tuple[object, object] | None = None
        self._found: dict[int, ReplicaPrediction] = {}

    def of(self, view: RunView) -> dict[int, ReplicaPrediction]:
        """By replica of the open round."""
        key = (view.replicas, view.state.estimates)
        # States are immutable, and share what has not changed.
        if self._of is None or any(one is not other for one, other in zip(key, self._of, strict=True)):
            cached = cache(step_time)
            self._found = {each.index: _predict(view, each, cached) for each in view.replicas}
            self._of = key
        return self._found


def _predict(view: RunView, replica: Replica, cached: object) -> ReplicaPrediction:
    spec, survey = view.status.spec, view.survey
    ks, microbatches = [link.k for link in replica.links], spec.microbatches_of(replica)
    assert callable(cached)
    step: StepTime = cached(*chain_costs(spec, survey, replica.members, ks), microbatches)
    messages = spec.inner.steps * microbatches
    links = tuple(
        LinkBytes(messages * down, messages * up) for down, up in (message_bytes(spec, k) for k in ks)
    )
    return ReplicaPrediction(step, bottleneck(survey, replica.members, step), links)
