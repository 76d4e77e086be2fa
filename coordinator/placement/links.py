"""The links of a chain: which end dials, and how many dimensions k of the activations cross each link.

A wider link loses less of the activations. So each link gets the widest k that makes a step hardly longer.
The possible values are those of `LinkSpec.possible_ks`; an uncompressed link (k 0) is the widest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from coordinator.placement.cost_model import (
    COMPARED_MICROBATCHES,
    Survey,
    chain_costs,
    compute_seconds,
    message_bytes,
)
from coordinator.placement.schedule import step_seconds
from coordinator.state.state import Peer
from coordinator.state.text import short
from protocol.spec.link import k_text, width_order
from protocol.spec.run import RunSpec
from protocol.trust.endpoints import ip_version
from protocol.types import Dialer, Link, Member, PeerId, Reachability, Replica, StageRange

_TOLERANCE_AT_FIRST, _TOLERANCE_TO_WIDEN, _TOLERANCE_BEFORE_NARROWING = 0.03, 0.02, 0.06
"""By this share a step may be longer than with the least k. The last two differ, else k would oscillate."""
MOST_OPERATIONS = 400_000
"""The search for k replays at most this many operations of members per plan, about half a second. A chain
keeps its k if it needs more than this alone.
"""


def member_of(peer: Peer, stages: StageRange) -> Member:
    """`peer` as a member with `stages`, at its present endpoint."""
    return Member(peer.peer, stages, peer.endpoint, peer.reachability is Reachability.RELAYED)


def can_be_neighbours(one: Peer | Member, other: Peer | Member) -> bool:
    """Whether one of the two accepts connections."""
    return bool(one.endpoint or other.endpoint)


def unreached_hosts(replicas: Sequence[Replica], peers: Mapping[PeerId, Peer]) -> list[PeerId]:
    """The hosts of a stage of which none is reached by others: their replicas cannot exchange payloads.

    Empty if there is no such stage, or one replica alone.
    """
    if len(replicas) < 2:
        return []
    for stage in range(replicas[0].members[-1].stages.stop):
        # Every tick asks this: it ends at the first host that is reached.
        hosts = (replica.host_of(stage).peer for replica in replicas)
        if all(peers[each].reachability is Reachability.DIAL_ONLY for each in hosts):
            return [replica.host_of(stage).peer for replica in replicas]
    return []


def links_between(members: Sequence[Member], k: int | Sequence[int]) -> tuple[Link, ...]:
    """Links with one `k` for all or one for each.

    The upstream end dials if the other accepts connections; but no link goes through a relay that can go
    without. Of two ends at addresses of two versions of IP, that of IPv6 dials: a machine that has both
    announces IPv6, so the other end has IPv4 alone.
    """
    ks = [k] * (len(members) - 1) if isinstance(k, int) else k
    return tuple(
        Link(width, _dialer(upstream, downstream))
        for (upstream, downstream), width in zip(pairwise(members), ks, strict=True)
    )


def _dialer(upstream: Member, downstream: Member) -> Dialer:
    is_upstream_open = bool(upstream.endpoint) and not upstream.relayed
    if not downstream.endpoint or (downstream.relayed and is_upstream_open):
        return Dialer.DOWNSTREAM
    if upstream.endpoint and upstream.relayed == downstream.relayed:
        versions = (ip_version(each.endpoint) for each in (upstream, downstream))
        return Dialer.DOWNSTREAM if tuple(versions) == (4, 6) else Dialer.UPSTREAM
    return Dialer.UPSTREAM


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
    compute, _ = chain_costs(spec, survey, members, start)
    # The searches below ask for the same costs many times. A given k need not be one of `widths`.
    costs = {k: chain_costs(spec, survey, members, [k] * len(given))[1] for k in {*widths, *given}}

    def seconds(ks: Sequence[int]) -> float:
        links = [costs[k][i] for i, k in enumerate(ks)]
        return step_seconds(compute, links, microbatches or spec.inner.microbatches)

    def widest(tolerance: float) -> list[int]:
        """Widen the links in turn while the step is at most `tolerance` longer."""
        ks = list(start)
        limit = seconds(ks) * (1 + tolerance)
        growing = [i for i, is_known in enumerate(known) if is_known]
        # All links reach one width before any gets the next, so that no link uses up the tolerance alone.
        for wider in widths[1:]:
            for i in list(growing):  # a copy, since the loop removes links
                narrower, ks[i] = ks[i], wider
                if seconds(ks) > limit:
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
    sizes = message_bytes(spec, after)
    seconds, bandwidth = max(
        (size / bandwidth, bandwidth) for size, bandwidth in zip(sizes, bandwidths, strict=True)
    )
    compute = max(compute_seconds(spec, survey, each.peer, each.stages) for each in (one, other))
    verb = "rises" if width_order(after) > width_order(before) else "falls"
    change = f"{verb} {k_text(before)} -> {k_text(after)}"
    return (
        f"k of the link {short(one.peer)} -> {short(other.peer)} {change}: "
        f"{8e-6 * bandwidth:.1f} Mb/s carry it in {seconds:.2g} s, computing takes {compute:.2g} s"
    )
