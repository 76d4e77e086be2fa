"""How many microbatches of an inner step each replica takes: fast ones take more, so that all end together.

The step lasts as long as the slowest replica needs for its share:

    step = max over replicas (share x seconds per microbatch),   sum of shares = replicas x usual share

A replica only claims its speed, and its share is its weight in the outer step. So no share exceeds half of
all microbatches, and a share grows at most to twice what the replica has already delivered.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import ceil, floor

from coordinator.state.state import KEPT_ROUNDS, State, peers_of
from coordinator.state.text import listed
from protocol.spec.run import RunSpec
from protocol.types import Replica

MOST_SHARE = 8
"""A replica takes at most this many times the usual microbatches."""
_MOST_GROWTH = 2
"""A share grows at most to this many times its former value, and only after that much was delivered."""
_BISECTIONS = 100


def largest_share(usual: int, replicas: int) -> int:
    """The most microbatches of one replica where each takes `usual` on average.

    Half of all; three quarters if there are two replicas, since one of them has half or more in any case.
    """
    return min(MOST_SHARE * usual, max(3 * usual // 2, replicas * usual // 2))


def fair_shares(seconds: Sequence[float], usual: int, most: Sequence[int]) -> list[int]:
    """How many microbatches each replica takes so that the slowest replica ends as early as possible.

    Shares are in proportion to speed, rounded down, but at least 1. Each remaining microbatch goes to the
    replica that would end it first.

    Args:
        seconds: of one microbatch on each replica, above 0.
        usual: microbatches of a replica on average.
        most: microbatches that each replica may take; their sum must be at least that of all shares.
    """

    def done_within(time: float) -> list[int]:
        return [max(1, floor(min(time / each, bound))) for each, bound in zip(seconds, most, strict=True)]

    total = usual * len(seconds)
    # Bisect the time of the step; in `high` all replicas reach their bounds.
    low, high = 0.0, max(seconds) * max(most)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(done_within(middle)) <= total else (low, middle)
    shares = done_within(low)
    # Rounding has left some microbatches: the heap has the replica on top that would end one more first.
    soonest = [((n + 1) * seconds[i], n, i) for i, n in enumerate(shares) if n < most[i]]
    heapify(soonest)
    for _ in range(total - sum(shares)):
        _, _, i = heappop(soonest)
        shares[i] += 1
        if shares[i] < most[i]:
            heappush(soonest, ((shares[i] + 1) * seconds[i], shares[i], i))
    return shares


def share_out(
    spec: RunSpec,
    replicas: Sequence[Replica],
    seconds: Sequence[float],
    limits: Sequence[int],
    are_changed: bool,
) -> tuple[list[Replica], list[str]]:
    """`replicas` with the microbatches that each should take, and a sentence if these change.

    Shares are equal where the run does not balance work, or where a speed is not known. Otherwise they are
    fair. They change only if that makes the step shorter by `grouping.margin`, or if the present shares are
    no longer possible.

    Args:
        seconds: of one microbatch on each replica; 0 where that is not known.
        limits: microbatches that each replica may take (:func:`share_limits`).
        are_changed: whether the present shares were made for other replicas.
    """
    usual = spec.inner.microbatches
    present = [spec.microbatches_of(replica) for replica in replicas]
    # When replicas come or go, the present shares no longer add up to the batch.
    is_complete = sum(present) == usual * len(replicas)
    if not spec.grouping.balance or not all(seconds):
        if is_complete and not are_changed:
            return list(replicas), []
        shares, why = [usual] * len(replicas), ""
    else:
        shares = fair_shares(seconds, usual, limits)
        step_now, step_fair = _step_seconds(present, seconds), _step_seconds(shares, seconds)
        may_stay = is_complete and all(now <= most for now, most in zip(present, limits, strict=True))
        if may_stay and step_fair >= step_now * (1 - spec.grouping.margin):
            return list(replicas), []
        why = f"they finish within {step_fair:.3g} s"
        if is_complete and step_fair < step_now:
            why = f"the slowest step falls from {step_now:.3g} s to {step_fair:.3g} s"
    differences = zip(replicas, shares, present, strict=True)
    changes = [f"{each.name} takes {n} instead of {before}" for each, n, before in differences if n != before]
    equal = f"every replica takes {usual} microbatches of a step again"
    reason = f"of the microbatches of a step {listed(changes)}: {why}" if why else equal
    return with_shares(spec, replicas, shares), [reason] if changes else []


def with_shares(spec: RunSpec, replicas: Sequence[Replica], shares: Sequence[int]) -> list[Replica]:
    """`replicas` that take these microbatches of a step and weigh accordingly."""
    usual = spec.inner.microbatches
    return [
        replace(replica, microbatches=0 if share == usual else share, weight=share / usual)
        for replica, share in zip(replicas, shares, strict=True)
    ]


def share_limits(
    state: State, replicas: Sequence[Replica], delivered: Mapping[int, tuple[float, float]]
) -> list[int]:
    """The most microbatches that each of `replicas` may take; their sum is at least that of all shares.

    - A replica that has delivered nothing yet takes at most what it takes now.
    - A replica whose last payload lacked some of its weight takes at most what that payload contained.
    - A replica with the same members as in the newest plan takes at most twice what it takes now.

    Where these limits sum up to less than the batch, each replica may at least keep its share.

    Args:
        delivered: :func:`delivered_weights` of `state`.
    """
    usual = state.spec.inner.microbatches
    bound = largest_share(usual, len(replicas))
    newest = {each.index: peers_of(each) for each in state.plans[-1].replicas}
    present = [state.spec.microbatches_of(replica) for replica in replicas]
    limits = []
    for replica, now in zip(replicas, present, strict=True):
        weight, assigned = delivered.get(replica.index, (0.0, 0.0))
        if not assigned:
            most = now
        elif weight < assigned:
            most = min(now, max(1, ceil(weight * usual)))  # weight = microbatches / usual
        elif peers_of(replica) == newest.get(replica.index):
            most = _MOST_GROWTH * now
        else:
            most = bound
        limits.append(min(most, bound))
    # The present shares may be too few as well, if a replica has left: then the usual ones are enough.
    for least in (present, [usual] * len(replicas)):
        if sum(limits) < usual * len(replicas):
            limits = [max(most, min(n, bound)) for most, n in zip(limits, least, strict=True)]
    return limits


def delivered_weights(state: State) -> dict[int, tuple[float, float]]:
    """By replica: the weight of its last committed payload of stage 0, and the weight in its plan."""
    found = dict[int, tuple[float, float]]()
    newest = state.current_round
    for round_number in range(newest, max(0, newest - KEPT_ROUNDS), -1):
        decision = state.decisions.get((0, round_number))
        for entry in decision.entries if decision else ():
            assignment = state.assignment(entry.descriptor.owner, round_number)
            if assignment is not None:
                weights = entry.descriptor.weight, assignment.replica.weight
                found.setdefault(assignment.replica.index, weights)
    return found


def _step_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, seconds, strict=True))
