"""The last choices of a plan: k of each link, and how many microbatches of a step each replica takes.

**k.** A wider link loses less of the activations. So each link gets the widest k that makes a step hardly
longer. The possible values are those of `LinkSpec.possible_ks`; an uncompressed link (k 0) is the widest.

**Shares.** Fast replicas take more microbatches, so that all end together. The step lasts as long as the
slowest replica needs for its share:

    step = max over replicas (share x seconds per microbatch),   sum of shares = batch

The batch is that of protocol.group.batch. coordinator.placement.rules bounds the shares.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import floor

from coordinator.base.phrases import listed, short
from coordinator.placement.cost_model import COMPARED_MICROBATCHES, Costs, Survey
from coordinator.placement.rules import links_between
from protocol.group.batch import batch_of, equal_shares, whole_batch, with_shares
from protocol.run_files.link_text import k_text
from protocol.spec.fixed import MARGIN
from protocol.spec.link import width_order
from protocol.spec.run import RunSpec
from protocol.types import Member, Replica

_TOLERANCE_AT_FIRST, _TOLERANCE_TO_WIDEN, _TOLERANCE_BEFORE_NARROWING = 0.03, 0.02, 0.06
"""By this share a step may be longer than with the least k. The last two differ, else k would oscillate."""
MOST_OPERATIONS = 400_000
"""The search for k replays at most this many operations of members per plan, about half a second. A chain
keeps its k if it needs more than this alone.
"""
_BISECTIONS = 100


def choose_k(
    spec: RunSpec,
    survey: Survey,
    members: Sequence[Member],
    present: Sequence[int] | None,
    microbatches: int = 0,
) -> tuple[int, ...]:
    """k of each link of `members`: the widest k with which a step is hardly longer than with the least k.

    k stays as it is where the run's k does not adapt, or where no speed or bandwidth is known.

    Args:
        present: k of each link now. Each k moves at most to the next possible value: to a wider one if that
            costs less than 2 % of the step, to a narrower one if the present k costs more than 6 %. None for
            a new chain.
        microbatches: in the steps that are compared; 0 means the number in the spec.
    """
    link = spec.link
    given = tuple(present) if present is not None else (link.k,) * (len(members) - 1)
    known = [survey.knows_link(one.peer, other.peer) for one, other in pairwise(members)]
    if not link.adapts or not any(known) or not all(survey.flops(each.peer) for each in members):
        return given
    widths = link.possible_ks
    start = [widths[0] if is_known else now for is_known, now in zip(known, given, strict=True)]
    costs = Costs(spec, survey)

    def widest(tolerance: float) -> list[int]:
        """Widen the links in turn while the step is at most `tolerance` longer."""
        ks = list(start)
        limit = costs.step(members, ks, microbatches).seconds * (1 + tolerance)
        growing = [i for i, is_known in enumerate(known) if is_known]
        # All links reach one width before any gets the next, so that no link uses up the tolerance alone.
        for wider in widths[1:]:
            for i in list(growing):  # a copy, since the loop removes links
                narrower, ks[i] = ks[i], wider
                if costs.step(members, ks, microbatches).seconds > limit:
                    ks[i] = narrower
                    growing.remove(i)
        return ks

    if present is None:  # a new chain has no k near which the next one should stay
        return tuple(widest(_TOLERANCE_AT_FIRST))
    least, most = widest(_TOLERANCE_TO_WIDEN), widest(_TOLERANCE_BEFORE_NARROWING)
    return tuple(
        _next_width(widths, now, low, max(low, high, key=width_order)) if is_known else now
        for is_known, now, low, high in zip(known, present, least, most, strict=True)
    )


def _next_width(widths: Sequence[int], now: int, low: int, high: int) -> int:
    """`now`, or the next of `widths` towards the interval `low` .. `high`."""
    if width_order(now) < width_order(low):
        return next(width for width in widths if width_order(width) > width_order(now))
    if width_order(now) > width_order(high):
        return next(width for width in reversed(widths) if width_order(width) < width_order(now))
    return now


def fit_k(
    spec: RunSpec,
    survey: Survey,
    replicas: Sequence[Replica],
    running: Collection[int],
    from_round: int,
    most_operations: int = MOST_OPERATIONS,
) -> tuple[list[Replica], list[str]]:
    """`replicas` with k adapted to what their links carry now, and a sentence for each link that changes.

    Args:
        running: indices of the replicas that are in the present plan.
        from_round: first round of the plan; it determines which replicas come first.
    """
    if not spec.link.adapts:
        return list(replicas), []
    due = _replicas_due(spec, replicas, running, from_round, most_operations)
    fitted, reasons = [], []
    for replica in replicas:
        before = tuple(link.k for link in replica.links)
        ks = before
        if replica.index in due:
            present = before if replica.index in running else None
            microbatches = min(spec.microbatches_of(replica), COMPARED_MICROBATCHES)
            ks = choose_k(spec, survey, replica.members, present, microbatches)
        fitted.append(replica if ks == before else replace(replica, links=links_between(replica.members, ks)))
        if replica.index in running:
            ends = zip(pairwise(replica.members), before, ks, strict=True)
            reasons += [_why_k(spec, survey, *pair, was, now) for pair, was, now in ends if was != now]
    return fitted, reasons


def _replicas_due(
    spec: RunSpec,
    replicas: Sequence[Replica],
    running: Collection[int],
    from_round: int,
    most_operations: int,
) -> set[int]:
    """The pipelines (by index) whose k is chosen for this plan: new ones first, then the others in turn."""
    # To choose k once, both searches replay the chain for each width of each link.
    widths = 2 + len(spec.link.possible_ks)
    microbatches = min(spec.inner.microbatches, COMPARED_MICROBATCHES)
    operations = {
        each.index: 2 * widths * len(each.links) * len(each.members) * microbatches
        for each in replicas
        if each.links
    }
    new = [index for index in operations if index not in running]
    others = [index for index in operations if index in running]
    if others:
        # Each round begins where the round before ended if all chains need as much as the longest one.
        per_round = max(1, most_operations // max(operations[index] for index in others))
        first = from_round * per_round % len(others)
        others = [*others[first:], *others[:first]]
    due, left = set(), most_operations
    for index in [*new, *others]:
        if operations[index] <= left:
            due.add(index)
            left -= operations[index]
    return due


def _why_k(spec: RunSpec, survey: Survey, one: Member, other: Member, before: int, after: int) -> str:
    """A sentence about the slower direction of the link and the computing of the slower end."""
    bandwidths = survey.bandwidth(one.peer, other.peer), survey.bandwidth(other.peer, one.peer)
    costs = Costs(spec, survey)
    ways = zip(costs.sizes(after), bandwidths, strict=True)
    seconds, bandwidth = max((size / bandwidth, bandwidth) for size, bandwidth in ways)
    compute = max(costs.compute(each.peer, each.stages) for each in (one, other))
    verb = "rises" if width_order(after) > width_order(before) else "falls"
    change = f"{verb} {k_text(before)} -> {k_text(after)}"
    return (
        f"k of the link {short(one.peer)} -> {short(other.peer)} {change}: "
        f"{8e-6 * bandwidth:.1f} Mb/s carry it in {seconds:.2g} s, computing takes {compute:.2g} s"
    )


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


def share_out(
    spec: RunSpec,
    replicas: Sequence[Replica],
    seconds: Sequence[float],
    limits: Sequence[int],
    are_changed: bool,
) -> tuple[list[Replica], list[str]]:
    """`replicas` with the microbatches that each should take, and sentences if these change.

    Shares are equal where the run does not balance work, or where a speed is not known. Otherwise they are
    fair. They change only if that makes the step shorter by MARGIN, or if the present shares are
    no longer possible.

    Args:
        seconds: of one microbatch on each replica; 0 where that is not known.
        limits: microbatches that each replica may take (:func:`share_limits`).
        are_changed: whether the present shares were made for other replicas.
    """
    present = [spec.microbatches_of(replica) for replica in replicas]
    total = whole_batch(spec, len(replicas))
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
        if may_stay and step_fair >= step_now * (1 - MARGIN):
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
    return [f"the batch has {batch} samples instead of {target}, one microbatch for each replica"]


def _step_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def _equal(spec: RunSpec, shares: Sequence[int]) -> str:
    if spec.grouping.batch == "variable":
        return f"every replica takes {shares[0]} microbatches of a step again"
    each = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} or {shares[0]}"
    return f"every replica takes {each} of the {sum(shares)} microbatches of a step"
