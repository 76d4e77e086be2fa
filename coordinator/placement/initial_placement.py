"""Makes the first plan of a run.

Full replicas are taken in order of arrival. Stage peers form pipelines by what they have measured, or in
order of arrival where nothing is measured.

Pure functions: the same peers in another order give the same plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from coordinator.placement.chain_search import even_cuts, members_along
from coordinator.placement.cost_model import (
    Survey,
    memory_budget,
    memory_needed,
    with_relays,
)
from coordinator.placement.initial_chains import FormedChain, form_chains, unconnected
from coordinator.placement.links import links_between, unreached_hosts
from coordinator.placement.predict import bottleneck
from coordinator.state.cause_text import lacking_text, no_exchange_text
from coordinator.state.state import Peer
from coordinator.state.text import Waiting, counted, listed, short
from protocol.algorithm.batch import with_equal_shares
from protocol.roles import POLICIES
from protocol.spec.link import k_text
from protocol.spec.run import RunSpec
from protocol.status import Cause, CauseCode
from protocol.types import Estimates, PeerId, Plan, Reachability, Replica

_MOST_MEMBERS_NAMED = 8
_MOST_PIPELINES_NAMED = 4
"""Of more pipelines a plan's reason describes only the slowest."""


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
) -> Plan | Waiting:
    """The first plan for those of `peers` that stay, or what it waits for.

    `uplinks` are those of the relays (coordinator.placement.relays).

    Full replicas come first in the plan. Stage peers form pipelines by what they can carry
    (coordinator.placement.initial_chains). Where no speed and no bandwidth is measured, they form pipelines
    in order of arrival with equal shares of the stages, if their memory holds these. The order changes only
    where otherwise two neighbours would have no endpoint.
    """
    staying = sorted((peer for peer in peers if peer.is_staying), key=lambda peer: peer.arrival)
    if lacks := lacking(staying, spec):
        return Waiting(f"waiting for {lacking_text(lacks)}")
    plan = _arranged(staying, spec, estimates or {}, uplinks or {})
    if isinstance(plan, Waiting):
        return plan
    if hosts := unreached_hosts(plan.replicas, {each.peer: each for each in staying}):
        return Waiting(
            f"waiting for 1 more peer that others reach: {no_exchange_text(hosts)}", unreachable=True
        )
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
) -> Plan | Waiting:
    """As :func:`initial_plan`, for peers in order of arrival that suffice by their number."""
    swarm = spec.swarm
    alone = _full_replicas([peer for peer in staying if not peer.policy.joins_pipelines], swarm.replicas)
    whole = [_replica(index, [peer], spec) for index, peer in enumerate(alone)]
    stage_peers = [peer for peer in staying if peer.policy.joins_pipelines]
    # Only peers that can be members: the speeds of others must not change the median.
    capacities = {peer.peer: peer.capacity for peer in stage_peers}
    known = {peer: each for peer, each in estimates.items() if peer in capacities}
    survey = with_relays(Survey.of(known, capacities), staying, uplinks)
    parts = [counted(len(whole), "full replica")] if whole else []
    if survey.is_blank or not swarm.pipelines:
        lines = _in_order_of_arrival(stage_peers, swarm.pipelines, swarm.chain_length)
        if isinstance(lines, Waiting):
            return lines
        pipelines = [_replica(index, line, spec) for index, line in enumerate(lines, len(whole))]
        # If the equal shares do not fit, the search below looks for cuts that do.
        if all(_has_memory(spec, survey, each) for each in pipelines):
            parts += [f"{counted(len(lines), 'pipeline')} of {swarm.stages} stages"] if lines else []
            reason = f"{' and '.join(parts)}, in order of arrival"
            return Plan(1, 1, 0, (*whole, *pipelines), reason)
    chains = form_chains(spec, survey, stage_peers, swarm.pipelines)
    if isinstance(chains, Waiting):
        return chains
    pipelines = [
        Replica(index, chain.members, links_between(chain.members, chain.ks))
        for index, chain in enumerate(chains, len(whole))
    ]
    parts.append(f"{counted(len(chains), 'pipeline')} by what peers can carry")
    reason = f"{' and '.join(parts)}: {_described(spec, survey, pipelines, chains)}"
    return Plan(1, 1, 0, (*whole, *pipelines), reason)


def _has_memory(spec: RunSpec, survey: Survey, replica: Replica) -> bool:
    """Whether each member whose memory is known can hold its stages."""
    able = [survey.capacity(member.peer) for member in replica.members]
    left = range(len(able), 0, -1)  # the members from each one to the end of the chain
    return all(
        memory_needed(spec, member.stages, n, each.device) <= memory_budget(spec, each)
        for member, each, n in zip(replica.members, able, left, strict=True)
    )


def _described(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], chains: Sequence[FormedChain]
) -> str:
    """Such as "replica-1: ..ab (stages 0-1), ..cd (2-3); step 0.8 s, bottleneck: uplink of ..cd"."""
    shown = list(zip(replicas, chains, strict=True))
    note = ""
    if len(shown) > _MOST_PIPELINES_NAMED:
        shown = [max(shown, key=lambda each: each[1].time.seconds)]
        note = "the slowest is "
    sentences = []
    for replica, chain in shown:
        noun = "stage " if len(chain.members[0].stages) == 1 else "stages "
        members = [
            f"{short(member.peer)} ({'' if i else noun}{member.stages})"
            for i, member in enumerate(chain.members)
        ]
        ks = f", k {'/'.join(map(k_text, chain.ks))}" if spec.link.adapts else ""
        cause = bottleneck(survey, chain.members, chain.time)
        step = f"step {chain.time.seconds:.2g} s, bottleneck: {cause}" if cause else "step unknown"
        sentences.append(f"{replica.name}: {listed(members, _MOST_MEMBERS_NAMED)}{ks}; {step}")
    return note + "; ".join(sentences)


def _in_order_of_arrival(peers: Sequence[Peer], count: int, length: int) -> list[list[Peer]] | Waiting:
    """Cut `peers` into `count` chains in which no two neighbours both lack an endpoint.

    Each position goes to the first peer that leaves enough peers for the other positions.
    """
    reachable = deque(peer for peer in peers if peer.endpoint)
    dialing = deque(peer for peer in peers if not peer.endpoint)
    unreachable = unconnected([peer.peer for peer in dialing])
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
                return unreachable
    return chains


def _replica(index: int, line: Sequence[Peer], spec: RunSpec) -> Replica:
    members = members_along(line, even_cuts(spec.swarm.stages, len(line)))
    return Replica(index, members, links_between(members, spec.link.k))
