"""Which peers form which replica when the run starts: by role and order of arrival.

Pure functions; whoever calls them with the same peers in another order gets the same plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.state import Peer
from protocol.spec import RunSpec
from protocol.types import Dialer, Link, Member, PeerId, Plan, Replica, Role, StageRange


@dataclass(frozen=True)
class Waiting:
    """No plan is possible yet. `sentence` says what is missing; `unreachable` that endpoints are."""

    sentence: str
    unreachable: bool = False


def needed(spec: RunSpec) -> dict[Role, int]:
    """How many peers of each role the run takes."""
    return {Role.STAGE: spec.swarm.pipelines * spec.swarm.stages, Role.REPLICA: spec.swarm.replicas}


def missing(peers: Iterable[Peer], spec: RunSpec) -> str:
    """Such as "1 more stage peer (1 of 2 here) and 1 more full replica (0 of 1 here)"; "" for nothing."""
    here = Counter(peer.role for peer in peers if peer.is_live)
    parts = []
    for role, total in needed(spec).items():
        short = total - here[role]
        if short > 0:
            noun = counted(short, "more stage peer" if role is Role.STAGE else "more full replica")
            parts.append(f"{noun} ({here[role]} of {total} here)")
    return " and ".join(parts)


def group(
    peers: Iterable[Peer], spec: RunSpec, epoch: int, from_round: int, first_sample: int
) -> Plan | Waiting:
    """The plan for `peers`, those that are not live left aside.

    Each full replica is one member with all stages. The stage peers form pipelines of one stage each. Both
    follow the order of arrival, from which pipelines deviate only as far as needed so that of every two
    neighbours at least one accepts connections. Full replicas come first in the plan.
    """
    live = sorted((peer for peer in peers if peer.is_live), key=lambda peer: peer.arrival)
    short = missing(live, spec)
    if short:
        return Waiting(f"waiting for {short}")
    stages, swarm = spec.swarm.stages, spec.swarm
    chains = _chains([peer for peer in live if peer.role is Role.STAGE], swarm.pipelines, stages)
    if isinstance(chains, Waiting):
        return chains
    whole = [peer for peer in live if peer.role is Role.REPLICA][: swarm.replicas]
    replicas = [
        Replica(index, (Member(peer.peer, StageRange(0, stages), peer.endpoint),), ())
        for index, peer in enumerate(whole)
    ]
    replicas += [_pipeline(len(whole) + i, chain, spec.link.k) for i, chain in enumerate(chains)]
    parts = [counted(len(whole), "full replica")] if whole else []
    parts += [f"{counted(len(chains), 'pipeline')} of {stages} stages"] if chains else []
    reason = f"{' and '.join(parts)}, in order of arrival"
    return Plan(epoch, from_round, first_sample, tuple(replicas), reason)


def _chains(peers: Sequence[Peer], count: int, stages: int) -> list[list[Peer]] | Waiting:
    """Cut `peers` (by arrival) into `count` chains in which no two neighbours both lack an endpoint.

    A chain of S members has room for ceil(S/2) without an endpoint, so it needs floor(S/2) with one: each
    chain leaves that many for every chain behind it.
    """
    reachable = deque(peer for peer in peers if peer.endpoint)
    dialing = deque(peer for peer in peers if not peer.endpoint)
    least = stages // 2
    usable = min(len(dialing), count * (stages - least))
    if len(reachable) < count * least or len(reachable) + usable < count * stages:
        pair = " and ".join(peer.peer for peer in list(dialing)[:2])
        sentence = (
            f"waiting for 1 more stage peer with an endpoint: {pair} have none, so cannot be neighbours"
        )
        return Waiting(sentence, unreachable=True)
    return [
        _chain(reachable, dialing, stages, spare=len(reachable) - later * least)
        for later in reversed(range(count))
    ]


def _chain(reachable: deque[Peer], dialing: deque[Peer], stages: int, spare: int) -> list[Peer]:
    """Take one chain from the heads of both queues: the earliest peer after which the rest can still follow.

    `spare` is how many of `reachable` this chain may take.
    """
    chain: list[Peer] = []
    for after in reversed(range(stages)):
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
    assert len(chain) == stages
    return chain


def _can_follow(slots: int, reachable: int, dialing: int, after_dialing: bool) -> bool:
    """Whether `slots` more members can follow, if no two neighbours may both only dial."""
    return reachable + min(dialing, (slots + (not after_dialing)) // 2) >= slots


def _pipeline(index: int, chain: Sequence[Peer], k: int) -> Replica:
    members = tuple(
        Member(peer.peer, StageRange(stage, stage + 1), peer.endpoint) for stage, peer in enumerate(chain)
    )
    return Replica(index, members, links_between(members, k))


def links_between(members: Sequence[Member], k: int) -> tuple[Link, ...]:
    """The upstream end dials, unless the other accepts no connections."""
    return tuple(Link(k, Dialer.UPSTREAM if each.endpoint else Dialer.DOWNSTREAM) for each in members[1:])


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """`names` for a sentence: the first `most`, then how many more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def short(peer: PeerId) -> str:
    """The end of a peer id, which tells peers apart, for sentences that name several."""
    return f"..{peer[-8:]}"
