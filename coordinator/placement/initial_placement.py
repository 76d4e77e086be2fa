"""Which peers form which replica when the run starts: by what they can carry, else by order of arrival.

Pure functions; whoever calls them with the same peers in another order gets the same plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from coordinator.placement.chain_search import even_cuts
from coordinator.placement.cost_model import Survey, memory_needed
from coordinator.placement.initial_chains import Chain, form, unconnected
from coordinator.state.state import Peer
from coordinator.state.text import Waiting, counted, listed, short
from protocol.roles import POLICIES
from protocol.spec.run import RunSpec
from protocol.types import (
    Dialer,
    Estimates,
    Link,
    Member,
    PeerId,
    Plan,
    Replica,
    StageRange,
)

__all__ = [
    "Waiting",
    "counted",
    "group",
    "links_between",
    "listed",
    "measuring",
    "missing",
    "short",
    "survey_of",
]

_MOST_MEMBERS = 8
_MOST_SHOWN = 4
"""Of more pipelines than these a plan's reason tells only the slowest."""


def missing(peers: Iterable[Peer], spec: RunSpec) -> str:
    """Such as "1 more stage peer (1 of 2 here) and 1 more full replica (0 of 1 here)"; "" for nothing."""
    here = Counter(peer.role for peer in peers if peer.is_staying)
    parts = []
    for role, policy in POLICIES.items():
        total = policy.peers_needed(spec)
        lacking = total - here[role]
        if lacking > 0:
            noun = counted(lacking, f"more {policy.noun}")
            parts.append(f"{noun} ({here[role]} of {total} here)")
    return " and ".join(parts)


def survey_of(peers: Iterable[Peer], estimates: Mapping[PeerId, Estimates]) -> Survey:
    """What is known of `peers`: their estimates, else what they said when they joined."""
    capacities = {peer.peer: peer.capacity for peer in peers}
    told = {peer: each for peer, each in estimates.items() if peer in capacities}
    return Survey.of(told, capacities)


def measuring(peers: Iterable[Peer], estimates: Mapping[PeerId, Estimates]) -> list[Peer]:
    """The stage peers that are about to tell their speed: it can be measured only after they have joined.

    They are those that have measured their connection: who does not want to measure tells neither.
    """
    told = ((peer, estimates[peer.peer].capacity) for peer in peers if peer.peer in estimates)
    return [peer for peer, able in told if peer.policy.joins_pipelines and able.uplink and not able.flops]


def group(
    peers: Iterable[Peer],
    spec: RunSpec,
    epoch: int,
    from_round: int,
    first_sample: int,
    estimates: Mapping[PeerId, Estimates] | None = None,
) -> Plan | Waiting:
    """The plan for `peers`, those that are gone or about to go left aside.

    Each full replica is one member with all stages, by order of arrival, and comes first in the plan. The
    stage peers form pipelines by what they can carry (coordinator.placement.initial_chains). Where none of them has measured a
    speed or bandwidth, they do so in order of arrival with equal shares of the stages, if their memory holds
    these; they deviate only as far as needed so that of two neighbours at least one accepts connections.
    """
    here = sorted((peer for peer in peers if peer.is_staying), key=lambda peer: peer.arrival)
    lacks = missing(here, spec)
    if lacks:
        return Waiting(f"waiting for {lacks}")
    stages, swarm = spec.swarm.stages, spec.swarm
    whole = [peer for peer in here if peer.policy.hosts_all_stages][: swarm.replicas]
    replicas = [
        Replica(index, (Member(peer.peer, StageRange(0, stages), peer.endpoint),), ())
        for index, peer in enumerate(whole)
    ]
    staged = [peer for peer in here if peer.policy.joins_pipelines]
    survey = survey_of(staged, estimates or {})
    parts = [counted(len(whole), "full replica")] if whole else []
    in_order: list[Replica] | None = None
    if survey.is_blank or not swarm.pipelines:
        lines = _chains(staged, swarm.pipelines, swarm.chain_length)
        if isinstance(lines, Waiting):
            return lines
        in_order = [_pipeline(len(whole) + i, line, spec) for i, line in enumerate(lines)]
    if in_order is not None and all(_has_memory(spec, survey, each) for each in in_order):
        replicas += in_order
        parts += [f"{counted(len(in_order), 'pipeline')} of {stages} stages"] if in_order else []
        reason = f"{' and '.join(parts)}, in order of arrival"
    else:
        chains = form(spec, survey, staged, swarm.pipelines)
        if isinstance(chains, Waiting):
            return chains
        formed = [
            Replica(len(whole) + i, chain.members, links_between(chain.members, chain.ks))
            for i, chain in enumerate(chains)
        ]
        replicas += formed
        parts.append(f"{counted(len(chains), 'pipeline')} by what peers can carry")
        reason = f"{' and '.join(parts)}: {_described(formed, chains, spec.link.adapts)}"
    return Plan(epoch, from_round, first_sample, tuple(replicas), reason)


def _has_memory(spec: RunSpec, survey: Survey, replica: Replica) -> bool:
    """Whether every member whose memory is known can hold its stages."""
    for position, member in enumerate(replica.members):
        able = survey.capacities[member.peer]
        needed = memory_needed(spec, member.stages, len(replica.members) - position, able.device)
        if able.memory_bytes and needed > (1 - spec.grouping.reserve) * able.memory_bytes:
            return False
    return True


def _described(replicas: Sequence[Replica], chains: Sequence[Chain], adapts: bool) -> str:
    """Such as "replica-1: ..ab (stages 0-1), ..cd (2-3); step 0.8 s, bottleneck: uplink of ..cd"."""
    told = list(zip(replicas, chains, strict=True))
    note = ""
    if len(told) > _MOST_SHOWN:
        told = [max(told, key=lambda each: each[1].time.seconds)]
        note = "the slowest is "
    sentences = []
    for replica, chain in told:
        first, *others = (f"{short(member.peer)} ({{}}{member.stages})" for member in chain.members)
        noun = "stage " if len(chain.members[0].stages) == 1 else "stages "
        members = listed([first.format(noun), *(other.format("") for other in others)], _MOST_MEMBERS)
        ks = f", k {'/'.join(map(str, chain.ks))}" if adapts else ""
        time = f"step {chain.time.seconds:.2g} s, bottleneck: {chain.time.bottleneck}"
        sentences.append(
            f"{replica.name}: {members}{ks}; {time if chain.time.bottleneck else 'step unknown'}"
        )
    return note + "; ".join(sentences)


def _chains(peers: Sequence[Peer], count: int, length: int) -> list[list[Peer]] | Waiting:
    """Cut `peers` (by arrival) into `count` chains in which no two neighbours both lack an endpoint.

    A chain of n members has room for ceil(n/2) without an endpoint, so it needs floor(n/2) with one: each
    chain leaves that many for every chain behind it.
    """
    reachable = deque(peer for peer in peers if peer.endpoint)
    dialing = deque(peer for peer in peers if not peer.endpoint)
    least = length // 2
    usable = min(len(dialing), count * (length - least))
    if len(reachable) < count * least or len(reachable) + usable < count * length:
        return unconnected([peer.peer for peer in dialing])
    return [
        _chain(reachable, dialing, length, spare=len(reachable) - later * least)
        for later in reversed(range(count))
    ]


def _chain(reachable: deque[Peer], dialing: deque[Peer], length: int, spare: int) -> list[Peer]:
    """Take one chain from the heads of both queues: the earliest peer after which the rest can still follow.

    `spare` is how many of `reachable` this chain may take.
    """
    chain: list[Peer] = []
    for after in reversed(range(length)):
        heads = sorted((queue[0] for queue in (reachable, dialing) if queue), key=lambda peer: peer.arrival)
        for peer in heads:
            if peer.endpoint and _can_follow(after, spare - 1, len(dialing), after_dialing=False):
                chain.append(reachable.popleft())
                spare -= 1
                break
            behind_dialing = bool(chain) and not chain[-1].endpoint
            if not (peer.endpoint or behind_dialing) and _can_follow(
                after, spare, len(dialing) - 1, after_dialing=True
            ):
                chain.append(dialing.popleft())
                break
    assert len(chain) == length
    return chain


def _can_follow(slots: int, reachable: int, dialing: int, after_dialing: bool) -> bool:
    """Whether `slots` more members can follow, if no two neighbours may both only dial."""
    return reachable + min(dialing, (slots + (not after_dialing)) // 2) >= slots


def _pipeline(index: int, line: Sequence[Peer], spec: RunSpec) -> Replica:
    ranges = (StageRange(first, stop) for first, stop in pairwise(even_cuts(spec.swarm.stages, len(line))))
    members = tuple(
        Member(peer.peer, stages, peer.endpoint) for peer, stages in zip(line, ranges, strict=True)
    )
    return Replica(index, members, links_between(members, spec.link.k))


def links_between(members: Sequence[Member], k: int | Sequence[int]) -> tuple[Link, ...]:
    """With one `k` for all, or one each. The upstream end dials, unless the other accepts no connections."""
    ks = [k] * (len(members) - 1) if isinstance(k, int) else k
    return tuple(
        Link(width, Dialer.UPSTREAM if each.endpoint else Dialer.DOWNSTREAM)
        for each, width in zip(members[1:], ks, strict=True)
    )
