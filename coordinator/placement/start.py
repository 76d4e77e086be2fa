"""The first plan of a run: full replicas in order of arrival, pipelines by what stage peers have measured.

The objective is the inner step of the slowest pipeline under the cost model. A member's memory suffices for
its stages, and one of two neighbours accepts connections. A peer that makes no pipeline faster stays a spare.

- For a few peers all possibilities are compared, so the result is the optimum. More bandwidth of any peer
  never makes it slower.
- For many peers the strongest are dealt out so that pipelines are alike; from there the search
  (coordinator.placement.search) makes free moves. This is a heuristic.
- Where nothing is measured, pipelines form in order of arrival, with equal shares of the stages.

k is chosen last, for pipelines that were found with the least k.

Pure functions: the same peers in another order give the same plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import comb, inf

from coordinator.base.phrases import counted, listed, short
from coordinator.placement.chains import Chain, ChainSearch, even_cuts, members_along
from coordinator.placement.cost_model import Survey, has_memory, memory_needed, with_relays
from coordinator.placement.predict import predict
from coordinator.placement.rules import links_between, unreached_hosts
from coordinator.placement.search import free_moves, improve, slowest
from coordinator.placement.tuning import choose_k
from coordinator.run.state.records import Peer
from protocol.group.batch import with_equal_shares
from protocol.roles import POLICIES
from protocol.run_files.link_text import k_text
from protocol.spec.run import RunSpec
from protocol.status import Cause, CauseCode
from protocol.types import Estimates, PeerId, Plan, Reachability, Replica, Role, StageRange

MOST_CHAINS_IN_FULL = 6_000
"""All possibilities are compared if the peers can form at most this many chains."""
_MOST_PEERS_IN_FULL = 10
"""All divisions into several pipelines are compared for at most this many peers."""
_STARTS = 4
"""The search starts from each of this many distributions of the peers."""
_MOST_MEMBERS_NAMED = 8
_MOST_PIPELINES_NAMED = 4
"""Of more pipelines a plan's reason describes only the slowest."""

_Solution = tuple[float, int, float, tuple[Chain, ...]]
"""Seconds of the slowest chain, deviation from the usual lengths, sum of seconds, and the chains."""


def lacking(peers: Iterable[Peer], spec: RunSpec) -> tuple[Cause, ...]:
    """A cause for each role of which the run needs more peers before it starts."""
    here = Counter(peer.role for peer in peers if peer.is_staying)
    needed = {role: policy.peers_needed(spec) for role, policy in POLICIES.items()}
    return tuple(
        Cause(CauseCode.PEERS_LACKING, role=role, count=total - here[role], total=total)
        for role, total in needed.items()
        if total > here[role]
    )


def measuring(peers: Iterable[Peer], estimates: Mapping[PeerId, Estimates]) -> list[Peer]:
    """The peers that will soon report their speed, which they can measure only after the join.

    Only speeds of stage peers matter, and of peers that may become one.

    They have measured their connection. A peer with measuring turned off reports neither.
    """
    known = ((peer, estimates[peer.peer].capacity) for peer in peers if peer.peer in estimates)
    asked = ((peer, able) for peer, able in known if peer.policy.joins_pipelines or peer.is_flexible)
    return [peer for peer, able in asked if able.uplink and not able.flops]


def initial_plan(
    peers: Iterable[Peer],
    spec: RunSpec,
    estimates: Mapping[PeerId, Estimates] | None = None,
    uplinks: Mapping[str, float] | None = None,
) -> Plan | Cause:
    """The first plan for those of `peers` that stay, or what it waits for.

    `uplinks` are those of the relays.

    Full replicas come first in the plan. Stage peers form pipelines by what they can carry. Where no speed
    and no bandwidth is measured, they form pipelines in order of arrival with equal shares of the stages, if
    their memory holds these. The order changes only where two neighbours would have no endpoint.
    """
    staying = sorted((peer for peer in peers if peer.is_staying), key=lambda peer: peer.arrival)
    if lacks := lacking(staying, spec):
        return Cause(CauseCode.PEERS_LACKING, causes=lacks)
    plan = _arranged(staying, spec, estimates or {}, uplinks or {})
    if isinstance(plan, Cause):
        return plan
    if hosts := unreached_hosts(plan.replicas, {each.peer: each for each in staying}):
        return Cause(CauseCode.HOST_LACKING, peers=tuple(hosts))
    return replace(plan, replicas=tuple(with_equal_shares(spec, plan.replicas)))


def _full_replicas(peers: Sequence[Peer], count: int) -> list[Peer]:
    """The first `count` of `peers`, one of them reached by others if any is: it can pass payloads on."""
    first, others = list(peers[:count]), peers[count:]
    if first and all(each.reachability is Reachability.DIAL_ONLY for each in first):
        reached = [each for each in others if each.reachability is not Reachability.DIAL_ONLY]
        first[-1:] = reached[:1] or first[-1:]
    return first


def _arranged(
    staying: Sequence[Peer],
    spec: RunSpec,
    estimates: Mapping[PeerId, Estimates],
    uplinks: Mapping[str, float],
) -> Plan | Cause:
    """As :func:`initial_plan`, for peers in order of arrival that suffice by their number."""
    swarm = spec.swarm
    alone = _full_replicas([peer for peer in staying if not peer.policy.joins_pipelines], swarm.replicas)
    full = [Replica(index, members_along([peer], (0, swarm.stages)), ()) for index, peer in enumerate(alone)]
    stage_peers = [peer for peer in staying if peer.policy.joins_pipelines]
    # Only peers that can be members: the speeds of others must not change the median.
    capacities = {peer.peer: peer.capacity for peer in stage_peers}
    known = {peer: each for peer, each in estimates.items() if peer in capacities}
    survey = with_relays(Survey.of(known, capacities), staying, uplinks)
    parts = [counted(len(full), "full replica")] if full else []
    if survey.is_blank or not swarm.pipelines:
        lines = _in_order_of_arrival(stage_peers, swarm.pipelines, swarm.chain_length)
        if isinstance(lines, Cause):
            return lines
        chains = [members_along(line, even_cuts(swarm.stages, len(line))) for line in lines]
        pipelines = [
            Replica(index, members, links_between(members, spec.link.k))
            for index, members in enumerate(chains, len(full))
        ]
        # If the equal shares do not fit, the search below looks for cuts that do.
        if all(_has_memory(spec, survey, each) for each in pipelines):
            parts += [f"{counted(len(lines), 'pipeline')} of {swarm.stages} stages"] if lines else []
            return Plan(1, 1, 0, (*full, *pipelines), f"{' and '.join(parts)}, in order of arrival")
    formed = form_pipelines(spec, survey, stage_peers, swarm.pipelines, len(full))
    if isinstance(formed, Cause):
        return formed
    parts.append(f"{counted(len(formed), 'pipeline')} by what peers can carry")
    reason = f"{' and '.join(parts)}: {_described(spec, survey, formed)}"
    return Plan(1, 1, 0, (*full, *formed), reason)


def _has_memory(spec: RunSpec, survey: Survey, replica: Replica) -> bool:
    """Whether each member whose memory is known can hold its stages."""
    left = range(len(replica.members), 0, -1)  # the members from each one to the end of the chain
    return all(
        has_memory(spec, survey.capacity(member.peer), member.stages, n)
        for member, n in zip(replica.members, left, strict=True)
    )


def _described(spec: RunSpec, survey: Survey, replicas: Sequence[Replica]) -> str:
    """Such as "replica-1: ..ab (stages 0-1), ..cd (2-3); step 0.8 s, bottleneck: uplink of ..cd"."""
    found = predict(spec, survey, replicas)
    is_long = len(replicas) > _MOST_PIPELINES_NAMED
    sentences = []
    for each in (found.slowest,) if is_long else found.replicas:
        members = each.replica.members
        noun = "stage " if len(members[0].stages) == 1 else "stages "
        names = [f"{short(m.peer)} ({'' if i else noun}{m.stages})" for i, m in enumerate(members)]
        ks = f", k {'/'.join(k_text(link.k) for link in each.replica.links)}" if spec.link.adapts else ""
        cause = each.bottleneck
        step = f"step {each.step.seconds:.2g} s, bottleneck: {cause}" if cause else "step unknown"
        sentences.append(f"{each.replica.name}: {listed(names, _MOST_MEMBERS_NAMED)}{ks}; {step}")
    return f"{'the slowest is ' if is_long else ''}{'; '.join(sentences)}"


def _in_order_of_arrival(peers: Sequence[Peer], count: int, length: int) -> list[list[Peer]] | Cause:
    """Cut `peers` into `count` chains in which no two neighbours both lack an endpoint.

    Each position goes to the first peer that leaves enough peers for the other positions.
    """
    reachable = deque(peer for peer in peers if peer.endpoint)
    dialing = deque(peer for peer in peers if not peer.endpoint)
    unconnected = Cause(CauseCode.ENDPOINT_LACKING, peers=tuple(peer.peer for peer in dialing))
    chains: list[list[Peer]] = [[] for _ in range(count)]
    for i, chain in enumerate(chains):
        for left in reversed(range(length)):
            heads = [queue for queue in (reachable, dialing) if queue]
            for queue in sorted(heads, key=lambda queue: queue[0].arrival):
                peer = queue[0]
                if not peer.endpoint and chain and not chain[-1].endpoint:
                    continue
                # A chain of n positions has room for ceil(n/2) peers without an endpoint.
                room = (left + bool(peer.endpoint)) // 2 + (count - i - 1) * -(-length // 2)
                dialing_left = len(dialing) - (not peer.endpoint)
                reachable_left = len(reachable) - bool(peer.endpoint)
                if reachable_left + min(dialing_left, room) >= left + (count - i - 1) * length:
                    chain.append(queue.popleft())
                    break
            else:
                return unconnected
    return chains


def form_pipelines(
    spec: RunSpec,
    survey: Survey,
    peers: Sequence[Peer],
    pipelines: int,
    first_index: int = 0,
    most_in_full: int = MOST_CHAINS_IN_FULL,
) -> tuple[Replica, ...] | Cause:
    """`pipelines` replicas out of `peers`, by the arrival of their first peer; the others stay spares."""
    by_arrival = sorted(peers, key=lambda peer: (peer.arrival, peer.peer))
    found = _search(spec, ChainSearch(spec, survey, by_arrival), pipelines, most_in_full)
    if found is None:
        return _why_not(spec, survey, by_arrival, pipelines)
    replicas = []
    for index, chain in enumerate(sorted(found, key=lambda each: min(each.order)), first_index):
        members = members_along((by_arrival[number] for number in chain.order), chain.cuts)
        ks = choose_k(spec, survey, members, None)
        replicas.append(Replica(index, members, links_between(members, ks)))
    return tuple(replicas)


def _search(
    spec: RunSpec, search: ChainSearch, pipelines: int, most_in_full: int = MOST_CHAINS_IN_FULL
) -> Sequence[Chain] | None:
    """The chains of all pipelines; None where no solution is found."""
    count = len(search.reachable)
    if pipelines == 0:
        return []
    lengths = range(2, min(search.stages, count) + 1)
    chains = sum(comb(count, length) * search.chains_of(length) for length in lengths)
    if chains <= most_in_full and (pipelines == 1 or count <= _MOST_PEERS_IN_FULL):
        return _best_of_all(spec, search, pipelines)
    return _LargeSwarm(spec, search, pipelines).run()


def _best_of_all(spec: RunSpec, search: ChainSearch, pipelines: int) -> Sequence[Chain] | None:
    """The optimum: the fastest chain of each set of peers, then the best `pipelines` disjoint sets.

    Of equally fast solutions it takes the one with the usual lengths, then the least sum of steps.
    """
    count = len(search.reachable)
    # By the lowest peer of the set, so that each solution is built once. Sets are bit masks.
    fastest: dict[int, list[tuple[int, Chain]]] = {}
    for length in range(2, min(search.stages, count) + 1):
        for group in combinations(range(count), length):
            chain = search.fastest(group)
            if chain is not None:
                fastest.setdefault(group[0], []).append((sum(1 << peer for peer in group), chain))

    @cache
    def best(peer: int, taken: int, left: int) -> _Solution:
        """`left` pipelines out of the peers from `peer` on that are not in `taken`."""
        if left == 0:
            return 0.0, 0, 0.0, ()
        if peer == count:
            return inf, 0, 0.0, ()
        options = [best(peer + 1, taken, left)]
        for mask, chain in fastest.get(peer, []):
            if not mask & taken:
                longest, deviation, total, others = best(peer + 1, taken | mask, left - 1)
                longest, total = max(longest, chain.seconds), total + chain.seconds
                deviation += abs(len(chain.order) - spec.swarm.chain_length)
                options.append((longest, deviation, total, (chain, *others)))
        # min takes the first of equal solutions, so the result does not depend on the chains themselves.
        return min(options, key=lambda option: option[:3])

    longest, _, _, chains = best(0, 0, pipelines)
    return chains if longest < inf else None


class _LargeSwarm:
    """For many peers: deal out the strongest, then make moves."""

    def __init__(self, spec: RunSpec, search: ChainSearch, pipelines: int) -> None:
        self._search, self._pipelines = search, pipelines
        self._usual = spec.swarm.chain_length
        count = len(search.reachable)
        self._burdens = [search.burden(peer, 1 / self._usual) for peer in range(count)]
        self._most_stages = [search.most_stages(peer) for peer in range(count)]
        self._usable = [peer for peer in range(count) if self._most_stages[peer]]

    def run(self) -> Sequence[Chain] | None:
        """Start from chains of several lengths, and improve the best of these starts."""
        most = min(self._search.stages, len(self._usable) // self._pipelines)
        if most < 2:
            return None
        usual = min(self._usual, most)
        halves = (usual >> halvings for halvings in range(1, usual.bit_length()))
        lengths = {
            min(max(2, length), most)
            for length in (*halves, usual - 1, usual, usual + 1, (usual + most) // 2, most)
        }
        starts = [
            start
            for length in sorted(lengths, key=lambda each: (abs(each - usual), each))
            for start in self._starts(length)
        ]
        best = sorted(starts, key=_seconds)[:_STARTS]
        for chains in best:
            improve(chains, free_moves(self._search, chains, self._burdens, self._usable))
        # min takes the first of equal ones.
        found = min(best, key=_seconds, default={})
        return [*found.values()] if found and _seconds(found) < inf else None

    def _starts(self, length: int) -> Iterator[dict[int, Chain]]:
        """Chains of `length` with similar burdens; if memory forbids some, chains with similar memory."""
        for weights in (self._burdens, [1 / most if most else inf for most in self._most_stages]):
            groups = self._deal(weights, length)
            if groups is None:
                return
            # An impossible chain stays in the start, since an exchange of members may make it possible.
            found = (self._search.chain(group) or Chain(inf, tuple(group)) for group in groups)
            chains = dict(enumerate(found))
            yield chains
            if _seconds(chains) < inf:
                return

    def _deal(self, weights: Sequence[float], length: int) -> list[list[int]] | None:
        """Groups of the lightest peers; None if there are too few. Each goes to the lightest group with room.

        A chain of n members has room for ceil(n/2) peers without an endpoint.
        """
        reachable, alternate = self._search.reachable, -(-length // 2)
        ranked = sorted(self._usable, key=lambda peer: (weights[peer], peer))
        dialing = [peer for peer in ranked if not reachable[peer]][: self._pipelines * alternate]
        allowed = set(dialing)
        chosen = [peer for peer in ranked if reachable[peer] or peer in allowed][: self._pipelines * length]
        if len(chosen) < self._pipelines * length:
            return None
        groups: list[list[int]] = [[] for _ in range(self._pipelines)]
        loads = [0.0] * self._pipelines
        # Peers without an endpoint come first: any group has room for the others.
        for is_reachable, room in ((False, alternate), (True, length)):
            lightest = [(loads[i], i) for i, group in enumerate(groups) if len(group) < room]
            heapify(lightest)
            for peer in reversed(chosen):  # the heaviest first: light peers then even the loads out
                if reachable[peer] == is_reachable:
                    _, i = heappop(lightest)
                    groups[i].append(peer)
                    loads[i] += weights[peer]
                    if len(groups[i]) < room:
                        heappush(lightest, (loads[i], i))
        return groups


def _seconds(chains: Mapping[int, Chain]) -> float:
    return slowest(chain.seconds for chain in chains.values())


def _why_not(spec: RunSpec, survey: Survey, peers: Sequence[Peer], pipelines: int) -> Cause:
    least = 2 * pipelines  # a pipeline has two members at least
    if len(peers) < least:
        lacks = Cause(CauseCode.PEERS_LACKING, role=Role.STAGE, count=least - len(peers), total=least)
        return Cause(CauseCode.PEERS_LACKING, causes=(lacks,))
    dialing = tuple(peer.peer for peer in peers if not peer.endpoint)
    reachable = ChainSearch(spec, survey, peers, ignore_endpoints=True)
    # If endpoints alone would make a solution possible, memory is not the cause.
    if dialing and _search(spec, reachable, pipelines) is not None:
        return Cause(CauseCode.ENDPOINT_LACKING, peers=dialing)
    search = ChainSearch(spec, survey, peers)
    needs = [memory_needed(spec, StageRange(stage, stage + 1), 1) for stage in range(search.stages)]
    budgets = [budget for budget in search.budgets if budget < inf]
    needed, able = pipelines * sum(needs), sum(budgets)
    return Cause(
        CauseCode.MEMORY_LACKING,
        count=needed,
        total=int(able),
        detail=f"{counted(pipelines, 'pipeline')} of {search.stages} stages take at least "
        f"{_megabytes(needed)}, and {_megabytes(max(needs))} for the largest stage; "
        f"{counted(len(peers), 'stage peer')} can give {_megabytes(able)}, "
        f"and {_megabytes(max(budgets, default=0.0))} at most",
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
