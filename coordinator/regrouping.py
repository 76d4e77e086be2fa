"""Which peers form which replica from round to round: by the places that they have.

Pure functions; whoever calls them with the same peers in another order gets the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.grouping import Waiting, links_between, listed, short
from coordinator.state import State, stages_of
from protocol.spec import RunSpec
from protocol.types import Member, Place, Plan, Replica

_MOST_DOUBLINGS = 6
_MOST_LACKS = 2
"""So much is told of what one replica lacks."""


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


def _pipeline_at(state: State, spec: RunSpec, index: int, chain: Sequence[Place]) -> Replica:
    members = tuple(Member(place.peer, place.stages, state.peers[place.peer].endpoint) for place in chain)
    return Replica(index, members, links_between(members, spec.link.k))
