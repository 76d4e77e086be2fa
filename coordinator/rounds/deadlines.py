"""How long a round waits. Measurements of the run set each deadline, within the bounds of the spec.

A multiple of the first replica's time fits both a laptop and a datacenter. A fixed deadline would not.
"""

from __future__ import annotations

from coordinator.state.state import State
from protocol.spec.run import RunSpec
from protocol.types import ExchangeGroup

LEAST_GATHER_SECONDS = 5.0
_MARGIN = 3.0
"""How much longer than measured a group may take to gather its payloads."""


def closes_at(state: State, spec: RunSpec) -> float | None:
    """When the groups of the current round close at the latest; None before its first offer.

    After the first offer, slow replicas have `straggler` times the inner phase of the first replica, at least
    `least_window` and at most `match_window` seconds.
    """
    if state.opened_at is None:
        return None
    timing = spec.timing
    steps = spec.inner.steps
    # D steps may have overlapped with the exchange of the round before, so H - D steps stand for all H. If
    # none did, the wait is too long by up to H / (H - D).
    wait = timing.straggler * (state.opened_at - state.began_at) * (steps / (steps - spec.outer.overlap))
    # A coordinator that was away could receive no offers, so the wait begins again at its start.
    return max(state.opened_at, state.started_at) + min(max(wait, timing.least_window), timing.match_window)


def gather_seconds(state: State, spec: RunSpec, stage: int, nbytes: int) -> float:
    """How many seconds a group may take to gather payloads of `nbytes` bytes in total.

    Three times the longest time per byte of the last rounds of `stage`, at least LEAST_GATHER_SECONDS and at
    most `fetch`; `fetch` before the first measurement.
    """
    # A deadline that was too short is itself the measured time, so the next one is three times as long.
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
    """Seconds from closing `group` to the latest decision: the time to gather, and the time to report."""
    # `decide` contains the longest time to gather, `fetch`: what remains is for reports.
    return group.seconds + spec.timing.decide - spec.timing.fetch
