"""Which peers form which replica: at first by role and order of arrival, later by the places that they have.

Pure functions; whoever calls them with the same peers in another order gets the same plan.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.state import Peer, State, stages_of
from protocol.spec import RunSpec
from protocol.types import Dialer, Link, Member, PeerId, Place, Plan, Replica, Role, StageRange

_MOST_DOUBLINGS = 6
_MOST_LACKS = 2
"""So much is told of what one replica lacks."""


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
            noun = _counted(short, "more stage peer" if role is Role.STAGE else "more full replica")
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
    parts = [_counted(len(whole), "full replica")] if whole else []
    parts += [f"{_counted(len(chains), 'pipeline')} of {stages} stages"] if chains else []
    reason = f"{' and '.join(parts)}, in order of arrival"
    return Plan(epoch, from_round, first_sample, tuple(replicas), reason)


def regroup(
    state: State, spec: RunSpec, epoch: int, from_round: int, first_sample: int
) -> Plan | Waiting | None:
    """The plan that takes over at `from_round`; None where the newest one still is the right one.

    It has every replica, by index, all of whose places are filled by live peers that either train in it now,
    unbroken, or have caught up. Replicas that stand keep their members, links and weight.
    """
    newest = state.plans[-1]
    absent = state.absent.get(newest.epoch, frozenset())
    standing = {
        replica.index: replica
        for replica in newest.replicas
        if not any(member.peer in absent for member in replica.members)
    }
    chains = complete_chains(state, spec)
    ready = [
        index
        for index, chain in chains.items()
        if index not in standing and all(is_synced(state, place, from_round) for place in chain)
    ]
    # One that gives up again and again would hold the others up each time; alone it may try as it likes.
    rested = [index for index in ready if rests_until(state, index) <= from_round]
    chosen = rested if standing or rested else ready
    replicas = [
        standing[index] if index in standing else _pipeline_at(state, spec, index, chains[index])
        for index in sorted([*standing, *chosen])
    ]
    if not replicas:
        return Waiting(
            f"no complete replica is left: {listed([*shortages(state, spec, from_round).values()])}"
        )
    if replicas == list(standing.values()) and len(standing) == len(newest.replicas):
        return None
    kept = {replica.index for replica in replicas}
    joining = [replica for replica in replicas if replica.index not in standing]
    reasons = [
        f"{replica.name} {'returns' if replica.index in state.seated else 'joins'}" for replica in joining
    ]
    dropped = [replica for replica in newest.replicas if replica.index not in kept]
    lost = [r.name for r in dropped if any(state.peers[member.peer].is_lost for member in r.members)]
    others = [replica.name for replica in dropped if replica.name not in lost]
    reasons += [f"goes on without {listed(lost)}, which lost a member"] if lost else []
    reasons += [f"goes on without {listed(others)}, which must catch up"] if others else []
    return Plan(epoch, from_round, first_sample, tuple(replicas), "; ".join(reasons))


def rests_until(state: State, index: int) -> int:
    """The round in which replica `index` may try again: after each failure but one twice as much later."""
    times, last = state.retreats.get(index, (0, 0))
    return last + 2 ** min(times - 1, _MOST_DOUBLINGS) if times > 1 else 0


def complete_chains(state: State, spec: RunSpec) -> dict[int, list[Place]]:
    """By index the replicas whose places cover all stages with live peers, in order of position."""
    chains: dict[int, list[Place]] = {}
    for place in state.places.values():
        if state.peers[place.peer].is_live:
            chains.setdefault(place.replica, []).append(place)
    complete = {}
    for index, places in chains.items():
        chain = sorted(places, key=lambda place: place.position)
        if [stage for place in chain for stage in place.stages] == list(range(spec.swarm.stages)):
            complete[index] = chain
    return complete


def is_synced(state: State, place: Place, from_round: int) -> bool:
    """Whether the peer of `place` can train from `from_round` on.

    It must have attested the anchors of its stages after the round before the last one: when the first stage
    of a round is decided, nobody can have attested that round yet.
    """
    if any(found[0] == place.peer for found in state.diverged):
        return False
    rounds = state.synced.get(place.peer, {})
    return all(rounds.get(stage, -1) >= max(0, from_round - 2) for stage in place.stages)


def shortages(state: State, spec: RunSpec, from_round: int) -> dict[int, str]:
    """What keeps replicas (by index) from training from `from_round` on, such as "replica-1 has lost Qm"."""
    chains: dict[int, dict[int, Place]] = {}
    for place in state.places.values():
        chains.setdefault(place.replica, {})[place.position] = place
    found = {}
    for index, chain in sorted(chains.items()):
        is_whole = any(len(place.stages) == spec.swarm.stages for place in chain.values())
        lacks = []
        for position in range(max(chain) + 1 if is_whole else spec.swarm.stages):
            held = chain.get(position)
            if held is None:
                lacks.append(f"has nobody for stage {position}")
            elif not state.peers[held.peer].is_live:
                lacks.append(f"has lost {short(held.peer)} ({stages_of(held)})")
            elif not is_synced(state, held, from_round):
                lacks.append(f"waits until {short(held.peer)} ({stages_of(held)}) has caught up")
        if not lacks and rests_until(state, index) > from_round:
            lacks.append(
                f"rests until round {rests_until(state, index)}, because its members could not go on"
            )
        if lacks:
            found[index] = f"replica-{index} {' and '.join(lacks[:_MOST_LACKS])}"
    return found


def short(peer: PeerId) -> str:
    """The end of a peer id, which tells peers apart, for sentences that name several."""
    return f"..{peer[-8:]}"


def _pipeline_at(state: State, spec: RunSpec, index: int, chain: Sequence[Place]) -> Replica:
    members = tuple(Member(place.peer, place.stages, state.peers[place.peer].endpoint) for place in chain)
    return Replica(index, members, _links(members, spec.link.k))


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
    return Replica(index, members, _links(members, k))


def _links(members: Sequence[Member], k: int) -> tuple[Link, ...]:
    """The upstream end dials, unless the other accepts no connections."""
    return tuple(Link(k, Dialer.UPSTREAM if each.endpoint else Dialer.DOWNSTREAM) for each in members[1:])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """`names` for a sentence: the first `most`, then how many more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
