"""What the cost model predicts of the newest plan (coordinator.placement.predict).

Only a new plan or new measurements of peers change it, and a large swarm takes a second, so it is kept.
"""

from __future__ import annotations

from coordinator.dashboard.view import RunView
from coordinator.placement.predict import ReplicaPrediction, predict


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
            found = predict(view.status.spec, view.survey, view.replicas).replicas if view.replicas else ()
            self._found = {each.replica.index: each for each in found}
            self._of = key
        return self._found
