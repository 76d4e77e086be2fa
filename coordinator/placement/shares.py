"""How many microbatches of an inner step each replica takes: fast ones take more, so that all end together.

The step lasts as long as the slowest replica needs for its share:

    step = max over replicas (share x seconds per microbatch),   sum of shares = batch

The batch is the whole one (protocol.algorithm.batch). With ``grouping.longest_phase`` it is at most what the
replicas train in that time, each at least one microbatch.

A replica only claims its speed, and its share is its weight in the outer step. So no share exceeds half of
all microbatches, and a share grows at most to twice what the replica has already delivered.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, floor

from coordinator.state.state import KEPT_ROUNDS, State, peers_of
from coordinator.state.text import listed
from protocol.algorithm.batch import (
    batch_of,
    equal_shares,
    learning_rate_factor,
    whole_batch,
    with_shares,
    work_behind,
    work_of,
)
from protocol.spec.run import RunSpec
from protocol.types import Replica

MOST_SHARE = 8
"""A replica takes at most this many times the usual microbatches."""
_MOST_GROWTH = 2
"""A share grows at most to this many times its former value, and only after that much was delivered."""
_BISECTIONS = 100


def largest_share(total: int, replicas: int) -> int:
    """The most of `total` microbatches that one of `replicas` takes; so many for each are enough for all.

    Half of all; three quarters if there are two replicas, since one of them has half or more in any case.
    """
    part = total // 2 if replicas > 2 else 3 * total // 4
    return max(ceil(total / replicas), min(MOST_SHARE * total // replicas, part))


def fair_shares(seconds: Sequence[float], total: int, most: Sequence[int]) -> list[int]:
    """How many microbatches each replica takes so that the slowest replica ends as early as possible.

    Each replica takes one. Then one after the other goes to the replica that would end it first; of several
    to the one with fewer, then to the first one. So a larger `total` takes nothing from any replica.

    Args:
        seconds: of one microbatch on each replica, above 0.
        total: microbatches of all replicas, at least one for each.
        most: microbatches that each replica may take; their sum must be at least `total`.
    """

    def done_within(time: float) -> list[int]:
        return [max(1, floor(min(time / each, bound))) for each, bound in zip(seconds, most, strict=True)]

    # Most of them are found by bisecting the time of the step; in `high` all replicas reach their bounds.
    low, high = 0.0, max(seconds) * max(most)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(done_within(middle)) <= total else (low, middle)
    # One less, since division and multiplication round differently.
    shares = [max(1, share - 1) for share in done_within(low)]
    # The heap has the replica on top that would end one more first.
    soonest = [((n + 1) * seconds[i], n, i) for i, n in enumerate(shares) if n < most[i]]
    heapify(soonest)
    for _ in range(total - sum(shares)):
        _, _, i = heappop(soonest)
        shares[i] += 1
        if shares[i] < most[i]:
            heappush(soonest, ((shares[i] + 1) * seconds[i], shares[i], i))
    return shares


def batch_in_time(spec: RunSpec, seconds: Sequence[float], limits: Sequence[int], present: int = 0) -> int:
    """Microbatches of all replicas in a step: the whole batch, or what fits in `grouping.longest_phase`.

    At least one of each replica. `present`, the batch of the same replicas so far, stays while it differs by
    less than `grouping.margin` from what fits; 0: there is none.
    """
    whole, grouping = whole_batch(spec, len(seconds)), spec.grouping
    if not grouping.longest_phase or not all(seconds):
        return whole
    step = grouping.longest_phase / spec.inner.steps
    if grouping.balance:
        in_time = sum(max(1, floor(min(step / s, n))) for s, n in zip(seconds, limits, strict=True))
    else:
        in_time = len(seconds) * max(1, floor(min(step / max(seconds), whole)))
    if in_time >= whole:
        return whole
    return present if abs(present - in_time) <= grouping.margin * present else in_time


def is_whole(spec: RunSpec, replicas: Sequence[Replica]) -> bool:
    """Whether the present shares add up to the batch; where a phase may take any time, to the whole one."""
    present = sum(map(spec.microbatches_of, replicas))
    whole = whole_batch(spec, len(replicas))
    return len(replicas) <= present <= whole if spec.grouping.longest_phase else present == whole


def share_out(
    spec: RunSpec,
    replicas: Sequence[Replica],
    seconds: Sequence[float],
    limits: Sequence[int],
    are_changed: bool,
) -> tuple[list[Replica], list[str]]:
    """`replicas` with the microbatches that each should take, and sentences if these change.

    Shares are equal where the run does not balance work, or where a speed is not known. Otherwise they are
    fair. They change only if that makes the step shorter by `grouping.margin`, or if the present shares are
    no longer possible.

    Args:
        seconds: of one microbatch on each replica; 0 where that is not known.
        limits: microbatches that each replica may take (:func:`share_limits`).
        are_changed: whether the present shares were made for other replicas.
    """
    present = [spec.microbatches_of(replica) for replica in replicas]
    total = batch_in_time(spec, seconds, limits, 0 if are_changed else sum(present))
    # When replicas come or go, the present shares no longer add up to the batch.
    is_complete = sum(present) == total
    if not spec.grouping.balance or not all(seconds):
        if is_complete and not are_changed:
            return list(replicas), []
        shares, why = equal_shares(total, len(replicas)), ""
    else:
        shares = fair_shares(seconds, total, limits)
        step_now, step_fair = _step_seconds(present, seconds), _step_seconds(shares, seconds)
        may_stay = is_complete and all(now <= most for now, most in zip(present, limits, strict=True))
        if may_stay and step_fair >= step_now * (1 - spec.grouping.margin):
            return list(replicas), []
        why = f"they finish within {step_fair:.3g} s"
        if is_complete and step_fair < step_now:
            why = f"the slowest step falls from {step_now:.3g} s to {step_fair:.3g} s"
    differences = zip(replicas, shares, present, strict=True)
    changes = [f"{each.name} takes {n} instead of {before}" for each, n, before in differences if n != before]
    reason = f"of the microbatches of a step {listed(changes)}: {why}" if why else _equal(spec, shares)
    shared = with_shares(spec, replicas, shares)
    return shared, [reason, *batch_notes(spec, shared)] if changes else []


def batch_notes(spec: RunSpec, replicas: Sequence[Replica]) -> list[str]:
    """A sentence if the batch of `replicas` is not the constant one of the run."""
    batch, target = batch_of(spec, replicas), spec.global_batch
    if spec.grouping.batch == "variable" or batch == target:
        return []
    if batch > target:
        return [f"the batch has {batch} samples instead of {target}, one microbatch for each replica"]
    longest, factor = spec.grouping.longest_phase, learning_rate_factor(spec, replicas)
    return [
        f"the batch has {batch} samples instead of {target}, as many as fit in inner phases of {longest:g} "
        f"s, and the learning rate is {factor:.2f} times as high"
    ]


def share_limits(
    state: State, replicas: Sequence[Replica], delivered: Mapping[int, tuple[float, float]]
) -> list[int]:
    """The most microbatches that each of `replicas` may take; their sum is at least that of all shares.

    - A replica that has delivered nothing yet takes at most what it takes now; of a constant batch, at most
      an equal share.
    - A replica whose last payload lacked some of its work takes at most what that payload contained.
    - A replica with the same members as in the newest plan takes at most twice what it takes now.

    Where these limits sum up to less than the batch, each replica may at least keep its share.

    Args:
        delivered: :func:`delivered_work` of `state`.
    """
    spec, usual = state.spec, state.spec.inner.microbatches
    total = whole_batch(spec, len(replicas))
    equal, bound = ceil(total / len(replicas)), largest_share(total, len(replicas))
    newest = {each.index: peers_of(each) for each in state.plans[-1].replicas}
    present = [spec.microbatches_of(replica) for replica in replicas]
    limits = []
    for replica, now in zip(replicas, present, strict=True):
        work, assigned = delivered.get(replica.index, (0.0, 0.0))
        if not assigned:
            most = now if spec.grouping.batch == "variable" else equal
        elif work < assigned:
            most = min(now, max(1, ceil(work * usual)))  # work = microbatches / usual
        elif peers_of(replica) == newest.get(replica.index):
            most = _MOST_GROWTH * now
        else:
            most = bound
        limits.append(min(most, bound))
    # The present shares may be too few as well, if a replica has left: then equal ones are enough.
    for least in (present, [equal] * len(replicas)):
        if sum(limits) < total:
            limits = [max(most, min(n, bound)) for most, n in zip(limits, least, strict=True)]
    return limits


def delivered_work(state: State) -> dict[int, tuple[float, float]]:
    """By replica: the work behind its last committed payload of stage 0, and its work in that plan."""
    found = dict[int, tuple[float, float]]()
    newest = state.current_round
    for round_number in range(newest, max(0, newest - KEPT_ROUNDS), -1):
        decision = state.decisions.get((0, round_number))
        for entry in decision.entries if decision else ():
            assignment = state.assignment(entry.descriptor.owner, round_number)
            if assignment is not None:
                replica, weight = assignment.replica, entry.descriptor.weight
                work = work_behind(state.spec, replica, weight), work_of(state.spec, replica)
                found.setdefault(replica.index, work)
    return found


def _step_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def _equal(spec: RunSpec, shares: Sequence[int]) -> str:
    if spec.grouping.batch == "variable":
        return f"every replica takes {shares[0]} microbatches of a step again"
    each = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} or {shares[0]}"
    return f"every replica takes {each} of the {sum(shares)} microbatches of a step"
