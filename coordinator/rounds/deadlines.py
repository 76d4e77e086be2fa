"""How long a round waits: deadlines from what the run has measured, within the bounds of the spec.

How long a round takes depends on its replicas and links, so no fixed deadline fits all runs. The spec bounds
each deadline from above; measurements make it shorter.
"""

from __future__ import annotations

from coordinator.state.state import State
from protocol.spec.run import RunSpec
from protocol.types import ExchangeGroup

LEAST_GATHER_SECONDS = 5.0
_MARGIN = 3.0


def closes_at(state: State, spec: RunSpec) -> float | None:
    """When the groups of the current round close at the latest; None before its first offer.

    Slow replicas have `straggler` times the inner phase of the first replica, at least `least_window` and at
    most `match_window` seconds. A restarted coordinator starts to wait anew.

    Steps that overlap with the exchange of the round before may have been trained before this one began, so
    its H - D steps stand for all H. Where none were, that is too generous by up to H / (H - D).
    """
    if state.opened_at is None:
        return None
    timing = spec.timing
    steps = spec.inner.steps
    wait = timing.straggler * (state.opened_at - state.began_at) * (steps / (steps - spec.outer.overlap))
    return max(state.opened_at, state.started_at) + min(max(wait, timing.least_window), timing.match_window)


def gather_seconds(state: State, spec: RunSpec, stage: int, nbytes: int) -> float:
    """How long a group may take to gather payloads of `nbytes` bytes in all.

    Three times as long as the slowest member took per byte in any of the last rounds of `stage`, within
    LEAST_GATHER_SECONDS and `fetch`; `fetch` before anything was measured. A deadline that was too short is
    measured as itself, so the next one is three times as long.
    """
    seconds_per_byte = [
        round_state.gathered_in / sum(descriptor.nbytes for descriptor in round_state.group.descriptors)
        for (its_stage, _), round_state in state.rounds.items()
        if its_stage == stage
        and round_state.gathered_in > 0
        and round_state.group is not None
        # A group of one has no payloads to gather.
        and len(round_state.group.descriptors) > 1
    ]
    most = spec.timing.fetch
    if not seconds_per_byte:
        return most
    return min(max(_MARGIN * max(seconds_per_byte) * nbytes, LEAST_GATHER_SECONDS), most)


def decide_seconds(spec: RunSpec, group: ExchangeGroup) -> float:
    """How long after `group` was closed its round is decided at the latest: gathering, and time to report."""
    return group.seconds + spec.timing.decide - spec.timing.fetch
