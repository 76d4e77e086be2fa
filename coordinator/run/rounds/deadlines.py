"""How long a round waits. Measurements of the run set each deadline, within the bounds of the spec.

A multiple of the time that replicas take fits both a laptop and a datacenter. A fixed deadline would not.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from coordinator.placement.phases import expected_seconds, half_time
from coordinator.run.state.settlement import settlement_of
from coordinator.run.state.state import State
from protocol.spec.fixed import LEAST_WINDOW_SECONDS
from protocol.spec.run import RunSpec
from protocol.types import ExchangeGroup, Replica

LEAST_GATHER_SECONDS = 5.0
FIRST_SECONDS = 10.0
"""Within these a new member has loaded its libraries, and those of a pipeline report a link that fails."""
_MARGIN = 3.0
"""How much longer than measured a group may take to gather its payloads.

In the last round of a run with two turns, a line carries the payloads of twice as many stages as before.
"""


def closes_at(state: State) -> float | None:
    """When the groups of the current round close at the latest; None while nothing tells.

    By weight, half of the live replicas decide: the wait begins when half have answered, and not before half
    are expected to. It lasts `straggler` times the inner phase until then, at least LEAST_WINDOW_SECONDS and
    at most `match_window` seconds. So a minority that answers early does not end the round for the others,
    and a minority that is slow or silent does not hold them up. In the first round of a plan it lasts at
    least FIRST_SECONDS while a replica has not answered: it may still start, or find that a link cannot be
    opened.

    Without an answer there is no deadline: an inner phase may take any time. As long as fewer than half have
    answered, the round closes `match_window` later than if these had come in time; if it is not known how
    long they take, it does not close.
    """
    if state.opened_at is None:
        return None
    timing, complete = state.spec.timing, state.complete_replicas(state.current_round)
    replicas = [each for each in complete if state.has_weight(each)]
    weight = sum(replica.weight for replica in replicas)
    answers = [
        (state.answered[replica.index] - state.began_at, replica.weight)
        for replica in replicas
        if replica.index in state.answered
    ]
    # Without complete replicas, their offers remain to be decided.
    answered = half_time(answers, weight) if replicas else state.opened_at - state.began_at
    expected = half_time(((expected_seconds(state, each), each.weight) for each in replicas), weight)
    longer = 0.0 if answered < inf else timing.match_window
    known = [seconds for seconds in (answered, expected) if seconds < inf]
    if not known:
        return None
    phase, steps = max(known), state.spec.inner.steps
    # D steps may have overlapped with the exchange of the round before, so H - D steps stand for all H. If
    # none did, the wait is too long by up to H / (H - D).
    wait = timing.straggler * phase * (steps / (steps - state.spec.outer.overlap))
    wait = min(max(wait, _least_window(state, replicas)), timing.match_window) + longer
    # A coordinator that was away could receive no offers, so the wait begins again at its start.
    return max(state.began_at + phase, state.started_at) + wait


def _least_window(state: State, replicas: Collection[Replica]) -> float:
    is_first = bool(state.plans) and state.plan_for(state.current_round).from_round == state.current_round
    is_open = any(each.index not in state.answered for each in replicas)
    return max(LEAST_WINDOW_SECONDS, FIRST_SECONDS) if is_first and is_open else LEAST_WINDOW_SECONDS


def gather_seconds(state: State, stage: int, nbytes: int) -> float:
    """How many seconds a group may take to exchange payloads of `nbytes` bytes in total.

    Three times the longest time per byte of the last rounds of `stage`, at least LEAST_GATHER_SECONDS and at
    most `fetch`; `fetch` before the first measurement.
    """
    work = settlement_of(state.spec).work
    # A deadline that was too short is itself the measured time, so the next one is three times as long.
    seconds_per_byte = [
        round_state.gathered_in / work(sum(descriptor.nbytes for descriptor in round_state.group.descriptors))
        for (its_stage, _), round_state in state.rounds.items()
        if its_stage == stage
        and round_state.gathered_in > 0
        and round_state.group is not None
        # A group of one has no payloads to gather.
        and len(round_state.group.descriptors) > 1
    ]
    most = state.spec.timing.fetch
    if not seconds_per_byte:
        return most
    seconds = max(seconds_per_byte) * work(nbytes)
    return min(max(_MARGIN * seconds, LEAST_GATHER_SECONDS), most)


def decide_seconds(spec: RunSpec, group: ExchangeGroup) -> float:
    """Seconds from closing `group` to the latest decision: the time to gather, and the time to report."""
    # `decide` contains the longest time to gather, `fetch`: what remains is for reports.
    return group.seconds + spec.timing.decide - spec.timing.fetch
