"""What makes the next plan faster at no cost: other neighbours, another k of a link, another share of work.

Anchors are bit-equal on all replicas after a round, so peers with the same stages may change places between
two rounds without moving any state. All three follow what peers have measured, by the cost model
(coordinator.placement.cost_model), and none does anything where that is unknown.

Pure: whoever asks with the same peers in another order gets the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import ceil, floor

from coordinator.placement.cost_model import Survey, choose_k, compute_seconds, message_bytes
from coordinator.placement.eligibility import fits, is_synced, peer_rests_until
from coordinator.placement.initial_placement import links_between
from coordinator.placement.local_search import MOST_COMPARED, SECONDS, Search, seconds_per_microbatch
from coordinator.state.state import KEPT_ROUNDS, State
from coordinator.state.text import listed, short
from protocol.spec.run import RunSpec
from protocol.types import Member, PeerId, Replica, ReservedAssignment

MOST_SHARE = 8
"""A replica takes at most so many times the usual microbatches."""
_MOST_GROWTH = 2
"""A share grows at most to so many times what it was, and only after that much was delivered."""
_HALVINGS = 100
_MOST_OPERATIONS = 400_000
"""So many operations of members are replayed at most to choose k: about half a second. A chain that alone
takes more keeps its k.
"""


class Tuner:
    """Tunes the replicas of the plan that takes over at `from_round`."""

    def __init__(self, state: State, spec: RunSpec, from_round: int) -> None:
        self._state, self._spec, self._from_round = state, spec, from_round
        capacities = {peer.peer: peer.capacity for peer in state.peers.values()}
        self._survey = Survey.of(state.estimates, capacities)
        # What is told before the first decision of a round may still be of the round before.
        earlier, newest = state.plan_for(max(1, from_round - 2)), state.plans[-1]
        self._lasting = set(map(_chain, earlier.replicas)) & set(map(_chain, newest.replicas))
        self._delivered = _delivered(state)

    def tuned(self, replicas: Sequence[Replica], is_settled: bool) -> tuple[list[Replica], list[str]]:
        """`replicas` with better neighbours, k and shares, and what changes for which reason.

        Neighbours change only where `is_settled`: nobody comes or goes with this plan. And only once
        something was committed: until then no share can follow.
        """
        newest = self._state.plans[-1]
        rebalanced_at = self._state.rebalanced_at
        may_change = (
            not rebalanced_at or self._from_round - rebalanced_at >= self._spec.grouping.settle_rounds
        )
        tuned, exchanges, shares = list(replicas), list[str](), list[str]()
        if is_settled and may_change and self._delivered:
            tuned, exchanges = self._with_better_neighbours(tuned)
        tuned, widths = self._with_fitting_k(tuned)
        others = [_peers(each) for each in tuned] != [_peers(each) for each in newest.replicas]
        usual = self._spec.inner.microbatches
        is_whole = sum(map(self._spec.microbatches_of, tuned)) == usual * len(tuned)
        if others or may_change or not is_whole:
            tuned, shares = self._with_fair_shares(tuned, others)
        return tuned, [*exchanges, *widths, *shares]

    # Neighbours

    def _with_better_neighbours(self, replicas: list[Replica]) -> tuple[list[Replica], list[str]]:
        search = Search(
            self._spec, self._survey, replicas, self._may_exchange(replicas), self._spares(), self._may_sit
        )
        search.run()
        grouping = self._spec.grouping
        before, after = search.before, search.after
        if not search.swaps or after >= before * (1 - grouping.margin):
            return replicas, []
        what = "their step, at fair shares," if grouping.balance else "the slowest step"
        gain = f"{what} falls from {before:.3g} s to {after:.3g} s"
        return search.replicas, [f"{listed(search.swaps)}: {gain}"]

    def _may_exchange(self, replicas: Sequence[Replica]) -> set[int]:
        """The pipelines (by index) whose members have all measured themselves and attested what is due."""
        return {
            replica.index
            for replica in replicas
            if len(replica.members) > 1
            and all(
                self._is_measured(member.peer)
                and is_synced(
                    self._state,
                    ReservedAssignment(member.peer, replica.index, i, member.stages),
                    self._from_round,
                )
                for i, member in enumerate(replica.members)
            )
        }

    def _spares(self) -> list[Member]:
        """Those that follow, and could train at once."""
        seated = self._state.assignments[self._state.plans[-1].epoch]
        return [
            Member(peer.peer, place.stages, peer.endpoint)
            for peer in sorted(self._state.staying, key=lambda each: each.peer)
            if peer.policy.joins_pipelines and peer.peer not in seated
            for place in [self._state.reservations.get(peer.peer)]
            if place is not None
            and self._is_measured(peer.peer)
            and is_synced(self._state, place, self._from_round)
            and peer_rests_until(self._state, peer.peer) <= self._from_round
        ]

    def _may_sit(self, member: Member, members_left: int) -> bool:
        return fits(self._state, self._spec, member.peer, member.stages, members_left)

    def _is_measured(self, peer: PeerId) -> bool:
        return self._state.estimates[peer].capacity.flops > 0

    # k

    def _with_fitting_k(self, replicas: Sequence[Replica]) -> tuple[list[Replica], list[str]]:
        if not self._spec.link.adapts:
            return list(replicas), []
        running = {replica.index for replica in self._state.plans[-1].replicas}
        due = self._due_for_k(replicas, running)
        tuned, reasons = [], []
        for replica in replicas:
            if replica.index not in due:
                tuned.append(replica)
                continue
            before = tuple(link.k for link in replica.links)
            present = before if replica.index in running else None
            microbatches = min(self._spec.microbatches_of(replica), MOST_COMPARED)
            ks = choose_k(self._spec, self._survey, replica.members, present, microbatches)
            tuned.append(
                replace(replica, links=links_between(replica.members, ks)) if ks != before else replica
            )
            ends = zip(pairwise(replica.members), before, ks, strict=True)
            reasons += [self._why_k(*pair, was, now) for pair, was, now in ends if present and was != now]
        return tuned, [listed(reasons)] if reasons else []

    def _due_for_k(self, replicas: Sequence[Replica], running: set[int]) -> set[int]:
        """The pipelines (by index) whose k is looked at this time: new ones, then the others in turn."""
        pipelines = [replica for replica in replicas if replica.links]
        efforts = {each.index: self._effort_for_k(len(each.links)) for each in pipelines}
        new = [each for each in pipelines if each.index not in running]
        others = [each for each in pipelines if each.index in running]
        if others:
            count = max(1, _MOST_OPERATIONS // max(efforts[each.index] for each in others))
            first = self._from_round * count % len(others)
            others = [*others[first:], *others[:first]]
        due, left = set(), _MOST_OPERATIONS
        for each in [*new, *others]:
            if efforts[each.index] <= left:
                due.add(each.index)
                left -= efforts[each.index]
        return due

    def _effort_for_k(self, links: int) -> int:
        link = self._spec.link
        rungs = 2 + (link.most_k // link.least_k).bit_length()
        return 2 * rungs * links * (links + 1) * min(self._spec.inner.microbatches, MOST_COMPARED)

    def _why_k(self, one: Member, other: Member, before: int, after: int) -> str:
        """Told of the slower direction, and of the slower end."""
        spec, survey = self._spec, self._survey
        there, back = survey.bandwidth(one.peer, other.peer), survey.bandwidth(other.peer, one.peer)
        down, up = message_bytes(spec, after)
        seconds, bandwidth = max((down / there, there), (up / back, back))
        compute = max(compute_seconds(spec, survey, each.peer, each.stages) for each in (one, other))
        moves = "rises" if after > before else "falls"
        return (
            f"k of the link {short(one.peer)} -> {short(other.peer)} {moves} {before} -> {after}: "
            f"{8e-6 * bandwidth:.1f} Mb/s carry it in {seconds:.2g} s, computing takes {compute:.2g} s"
        )

    # Shares

    def _with_fair_shares(self, replicas: Sequence[Replica], others: bool) -> tuple[list[Replica], list[str]]:
        """Microbatches by speed. `others`: the present shares are those of other replicas."""
        usual = self._spec.inner.microbatches
        present = [self._spec.microbatches_of(replica) for replica in replicas]
        is_whole = sum(present) == usual * len(replicas)
        seconds = [self._microbatch_seconds(replica) for replica in replicas]
        if not self._spec.grouping.balance or not all(seconds):
            if is_whole and not others:
                return list(replicas), []
            shares = [usual] * len(replicas)
        else:
            limits = self._limits(replicas, present)
            shares = fair_shares(seconds, usual, limits)
            slowest = max(n * each for n, each in zip(present, seconds, strict=True))
            fair = max(n * each for n, each in zip(shares, seconds, strict=True))
            is_allowed = is_whole and all(n <= most for n, most in zip(present, limits, strict=True))
            if is_allowed and fair >= slowest * (1 - self._spec.grouping.margin):
                return list(replicas), []
        tuned = [_sharing(replica, n, usual) for replica, n in zip(replicas, shares, strict=True)]
        changed = [
            f"{replica.name} takes {n} instead of {before}"
            for replica, n, before in zip(replicas, shares, present, strict=True)
            if n != before
        ]
        if not changed:
            return tuned, []
        if not all(seconds) or not self._spec.grouping.balance:
            return tuned, [f"every replica takes {usual} microbatches of a step again"]
        gain = f"the slowest step falls from {slowest:.3g} s to {fair:.3g} s"
        why = gain if is_whole and fair < slowest else f"they finish within {fair:.3g} s"
        return tuned, [f"of the microbatches of a step {listed(changed)}: {why}"]

    def _limits(self, replicas: Sequence[Replica], present: Sequence[int]) -> list[int]:
        """The most microbatches that each replica may take, no fewer in sum than there are.

        With the same members none takes more than twice what it takes now. Who has delivered nothing yet
        takes no more than now, and whose last payload did not have all its weight, what that one had. Where
        they cannot do all the work so, they go on with what they have.
        """
        usual = self._spec.inner.microbatches
        total, bound = usual * len(replicas), largest_share(usual, len(replicas))
        chains = {each.index: _peers(each) for each in self._state.plans[-1].replicas}
        limits = []
        for replica, now in zip(replicas, present, strict=True):
            weight, assigned = self._delivered.get(replica.index, (0.0, 0.0))
            if not assigned:
                most = now
            elif weight < assigned:
                most = min(now, max(1, ceil(weight * usual)))
            else:
                most = _MOST_GROWTH * now if _peers(replica) == chains.get(replica.index) else bound
            limits.append(min(most, bound))
        for least in (present, [usual] * len(replicas)):
            if sum(limits) < total:
                limits = [max(most, min(n, bound)) for most, n in zip(limits, least, strict=True)]
        return limits

    def _microbatch_seconds(self, replica: Replica) -> float:
        """As its first member measured it under this very chain, else as predicted; 0 if nothing is known."""
        measured = self._state.estimates[replica.members[0].peer].microbatch_seconds
        if measured > 0 and _chain(replica) in self._lasting:
            return max(SECONDS[0], min(SECONDS[1], measured))
        return seconds_per_microbatch(self._spec, self._survey, *_chain(replica))


def largest_share(usual: int, replicas: int) -> int:
    """Of so many microbatches on average: speed is only claimed, and gives weight.

    Half of all; of two replicas three quarters, since one of them has more than half of any other share.
    """
    return min(MOST_SHARE * usual, max(3 * usual // 2, replicas * usual // 2))


def fair_shares(seconds: Sequence[float], usual: int, most: Sequence[int]) -> list[int]:
    """How many microbatches each replica takes, so that the slowest is done soonest.

    Args:
        seconds: that one microbatch takes each replica, above 0.
        usual: microbatches of a replica on average.
        most: that each replica may take, in sum no fewer than all.

    In proportion to speed, rounded down, but at least 1; each one that is left goes to whoever would be done
    with it first.
    """

    def done_within(time: float) -> list[int]:
        return [max(1, floor(min(time / each, bound))) for each, bound in zip(seconds, most, strict=True)]

    total = usual * len(seconds)
    low, high = 0.0, max(seconds) * max(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(done_within(middle)) <= total else (low, middle)
    shares = done_within(low)
    soonest = [((n + 1) * seconds[i], n, i) for i, n in enumerate(shares) if n < most[i]]
    heapify(soonest)
    for _ in range(total - sum(shares)):
        _, _, i = heappop(soonest)
        shares[i] += 1
        if shares[i] < most[i]:
            heappush(soonest, ((shares[i] + 1) * seconds[i], shares[i], i))
    return shares


def _delivered(state: State) -> dict[int, tuple[float, float]]:
    """By replica the weight of its last committed payload of stage 0, and the one that the plan gave it."""
    found = dict[int, tuple[float, float]]()
    newest = state.current_round
    for round_number in range(newest, max(0, newest - KEPT_ROUNDS), -1):
        decision = state.decisions.get((0, round_number))
        for entry in decision.entries if decision else ():
            assignment = state.assignment(entry.descriptor.owner, round_number)
            if assignment is not None:
                found.setdefault(
                    assignment.replica.index, (entry.descriptor.weight, assignment.replica.weight)
                )
    return found


def _sharing(replica: Replica, microbatches: int, usual: int) -> Replica:
    if microbatches == usual:
        return replace(replica, microbatches=0, weight=1.0)
    return replace(replica, microbatches=microbatches, weight=microbatches / usual)


def _chain(replica: Replica) -> tuple[tuple[Member, ...], tuple[int, ...]]:
    return replica.members, tuple(link.k for link in replica.links)


def _peers(replica: Replica) -> list[PeerId]:
    return [member.peer for member in replica.members]
