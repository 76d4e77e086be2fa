"""How long the replicas of a round take for their inner phases, and how much they weigh.

Times are measured from the beginning of a round to the first answer of a replica, an offer or the word that
it withholds, and are kept per unit of work (protocol.group.batch.work_of): a part of the phase, or
another share of the microbatches, takes that part of the time. All of it follows from stored events.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from statistics import median_low

from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.batch import work_of
from protocol.math.flops import microbatch_flops
from protocol.types import PayloadDescriptor, Replica

FASTER = 4.0
"""A phase takes at least its fastest known time, divided by this.

The same machine is that much faster when other programs stop and its throttling ends. Few phases of an
honest replica are shorter, and those cost it a wait of less than a quarter of a phase.
"""
_LEAST_PHASES = 2
"""The first phase of a chain contains the start of processes and links, so alone it says little."""


def expected_seconds(state: State, replica: Replica) -> float:
    """From the beginning of a round to the offer of `replica`; infinite where nothing is known."""
    phases = state.phase_seconds.get(replica.index)
    per_work = median_low(phases) if phases else _predicted(state, replica)
    return inf if per_work is None else per_work * work_of(state.spec, replica)


def earliest(state: State, descriptor: PayloadDescriptor) -> float:
    """When the replica of a payload, whose owner hosts the stage, can have trained it at the earliest."""
    assignment = state.assignment(descriptor.owner, descriptor.round_number)
    assert assignment is not None, "the owner hosts the stage"
    replica, round_number = assignment.replica, descriptor.round_number
    # Behind the payloads of all stages are the same steps.
    has_offered = any(
        replica.host_of(stage).peer in state.round_of(stage, round_number).offers
        for stage in range(state.stages)
    )
    if round_number < state.current_round or has_offered:
        return state.began_at
    return state.began_at + _least_seconds(state, replica, descriptor.weight)


def check_not_early(state: State, descriptor: PayloadDescriptor, now: float) -> None:
    """Raises OFFER_TOO_EARLY before :func:`earliest`, and while the run is paused before this round."""
    if state.is_held:
        raise HetnodeError(
            ErrorCode.OFFER_TOO_EARLY,
            f"The run is paused, and {descriptor.owner} offers a payload of round {descriptor.round_number}, "
            "which has not begun.",
            "Offer it again when the run goes on; a node does so by itself, and no step of it is lost.",
        )
    at = earliest(state, descriptor)
    if now >= at:
        return
    raise HetnodeError(
        ErrorCode.OFFER_TOO_EARLY,
        f"{descriptor.owner} offers a payload {now - state.began_at:.3g} s after round "
        f"{descriptor.round_number} began, but that number of steps takes its replica at least "
        f"{at - state.began_at:.3g} s, a quarter of its best time so far.",
        f"Offer it again in {at - now:.3g} s; a node does so by itself, and no step of it is lost.",
    )


def _least_seconds(state: State, replica: Replica, weight: float) -> float:
    """The shortest time from the beginning of the round in which `replica` trains so much; 0 if unknown."""
    phases = state.phase_seconds.get(replica.index, ())
    is_measured = len(phases) >= _LEAST_PHASES
    per_work = min(phases) if is_measured else _predicted(state, replica) or 0.0
    steps = state.spec.inner.steps * weight / replica.weight
    in_round = max(0.0, 1 - state.spec.outer.overlap / steps)  # D steps may be older than the round
    seconds = per_work * weight * in_round / FASTER
    # A speed measured on a busy machine is wrong by any factor.
    return seconds if is_measured else min(seconds, state.spec.timing.match_window)


def half_time(times: Iterable[tuple[float, float]], weight: float) -> float:
    """The smallest of `times`, pairs of time and weight, by which half of `weight` is reached; else inf."""
    reached = 0.0
    for time, its_weight in sorted(times):
        reached += its_weight
        if 2 * reached >= weight:
            return time
    return inf


def _predicted(state: State, replica: Replica) -> float | None:
    """Seconds of computing alone per unit of work, by the slowest member with a known speed; None without.

    No chain is faster than its slowest member. Waits for links come on top: those are known less well.
    """
    seconds = [
        microbatch_flops(state.spec, member.stages) / flops
        for member in replica.members
        if (flops := state.estimates[member.peer].capacity.flops or state.peers[member.peer].capacity.flops)
    ]
    inner = state.spec.inner
    return inner.steps * inner.microbatches * max(seconds) if seconds else None
