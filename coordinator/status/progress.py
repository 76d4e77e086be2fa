"""How long the open round takes, and how long the run still takes, if it goes on as in its last rounds."""

from __future__ import annotations

from math import inf
from statistics import median

from coordinator.placement.phases import expected_seconds, half_time
from coordinator.run.rounds.rounds import is_stalled
from coordinator.run.state.state import State
from protocol.status import RunPhase


def expected_round_seconds(state: State) -> float | None:
    """Of a round from its begin to its last decision: the median of the last ones; None while nothing tells.

    Before the first has ended it is the expected time of the inner phase.
    """
    if state.round_durations:
        return median(state.round_durations)
    replicas = state.complete_replicas(state.current_round) if state.plans else []
    times = [(expected_seconds(state, each), each.weight) for each in replicas]
    seconds = half_time(times, sum(each.weight for each in replicas))
    return seconds if 0 < seconds < inf else None


def remaining_seconds(state: State, now: float) -> float | None:
    """Until the last decision of the run; 0 after it. None while nothing tells, in a pause, or in a stall."""
    rounds = state.spec.rounds - state.rounds_decided
    if state.phase is RunPhase.GATHERING:
        return None
    if state.phase is RunPhase.FINISHED or not rounds:
        return 0.0
    each = expected_round_seconds(state)
    if each is None or state.is_held or is_stalled(state):
        return None
    # A round that takes longer than expected ends at any moment, as far as is known.
    return rounds * each - min(each, max(0.0, now - state.began_at))
