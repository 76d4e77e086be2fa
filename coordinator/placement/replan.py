"""Which peers form which replica from round to round: by the places that they have.

All replicas have bit-equal anchors after a round, so peers with the same stages may stand in for one another
at once: a replica that has lost a member, or is about to, goes on with a spare that has followed the rounds
of those stages. Spares are the stage peers whose own pipeline does not train, above all those of the next
pipeline, which is not full yet.

Pure functions; whoever calls them with the same peers in another order gets the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.placement.eligibility import (
    can_be_neighbours,
    fits,
    is_synced,
    peer_rests_until,
    rests_until,
)
from coordinator.placement.initial_placement import links_between
from coordinator.placement.rebalance import Tuner
from coordinator.state.state import State, stages_of
from coordinator.state.text import Waiting, listed, short
from protocol.spec.run import RunSpec
from protocol.types import Lifecycle, Member, PeerId, Plan, Replica, ReservedAssignment

_MOST_LACKS = 2
"""So much is told of what one replica lacks."""

Chain = tuple[ReservedAssignment, ...]
"""The places of a replica in order of position, each with the peer that is to have it."""


def regroup(
    state: State, spec: RunSpec, epoch: int, from_round: int, first_sample: int
) -> Plan | Waiting | None:
    """The plan that takes over at `from_round`; None where the newest one still is the right one.

    Replicas that stand keep their members: all of these take part, and none drains. To them come, by index,
    the replicas whose every place is filled by a peer that has caught up and rested: by the one that has the
    place, else by a spare with the same stages. A pipeline that was never in a plan trains only if
    `grouping.spares` stage peers are left as spares. Where no replica would be left, flapping peers do not
    rest, no spares are kept, and members that drain stay seated.

    Only where nobody comes or goes, the plan may change to become faster (coordinator.placement.rebalance).
    """
    newest = state.plans[-1]
    chosen = _chosen(state, spec, from_round)
    if not chosen.run_view and not chosen.chains:
        lacks = [*shortages(state, spec, from_round).values()]
        return Waiting(f"no complete replica is left: {listed(lacks)}")
    tuner = Tuner(state, spec, from_round)
    replicas = [
        chosen.run_view[index]
        if index in chosen.run_view
        else _replica(state, spec, index, chosen.chains[index])
        for index in sorted([*chosen.run_view, *chosen.chains])
    ]
    # A replica that comes back with the same members needs a plan, too: under the newest one it is broken.
    is_same = not chosen.chains and len(chosen.run_view) == len(newest.replicas)
    reasons = _reasons(state, chosen, from_round)
    replicas, faster = tuner.tuned(replicas, is_settled=is_same)
    if is_same and replicas == list(newest.replicas):
        return None
    return Plan(epoch, from_round, first_sample, tuple(replicas), "; ".join([*reasons, *faster]))


@dataclass(frozen=True)
class _Chosen:
    """The replicas that train next, by index: those that stand, and those that are put together anew."""

    run_view: Mapping[int, Replica]
    chains: Mapping[int, Chain] = field(default_factory=dict)


def _chosen(state: State, spec: RunSpec, from_round: int) -> _Chosen:
    """Nobody rests, is kept as a spare, or goes before its successor comes, where nobody else would train."""
    for lenient in (False, True):
        chosen = _choose(state, spec, from_round, lenient)
        if chosen.run_view or chosen.chains:
            return chosen
    return _Chosen(_run_view(state, with_draining=True))


def _run_view(state: State, with_draining: bool) -> dict[int, Replica]:
    newest = state.plans[-1]
    absent = state.absent.get(newest.epoch, frozenset())
    return {
        replica.index: replica
        for replica in newest.replicas
        if not any(member.peer in absent for member in replica.members)
        and (with_draining or all(state.peers[member.peer].is_staying for member in replica.members))
    }


def _choose(state: State, spec: RunSpec, from_round: int, lenient: bool) -> _Chosen:
    run_view = _run_view(state, with_draining=False)
    held = {
        place.slot: place
        for place in state.reservations.values()
        if place.replica not in run_view and _is_ready(state, place, from_round, lenient)
    }
    # Who has trained before comes first, and takes its spares from those that come after it.
    waiting = sorted(
        {place.replica for place in state.reservations.values()} - run_view.keys(),
        key=lambda index: (index not in state.assigned_replicas, index),
    )
    complete = complete_chains(state, spec)
    chains: dict[int, Chain] = {}
    for turn, index in enumerate(waiting):
        if rests_until(state, index) > from_round and not lenient:
            continue
        later = {other: rank for rank, other in enumerate(waiting[turn + 1 :])}
        spares = [place for place in held.values() if place.replica in later]
        spares.sort(key=lambda place: (place.replica in complete, -later[place.replica], place.position))
        chain = _filled(state, spec, index, held, spares)
        needs_no_spares = lenient or index in state.assigned_replicas
        if chain is None or not (needs_no_spares or _leaves_spares(state, spec, run_view, chains, chain)):
            continue
        chains[index] = chain
        taken = {place.peer for place in chain}
        held = {where: place for where, place in held.items() if place.peer not in taken}
    return _Chosen(run_view, chains)


def _is_ready(state: State, place: ReservedAssignment, from_round: int, lenient: bool) -> bool:
    has_rested = lenient or peer_rests_until(state, place.peer) <= from_round
    return has_rested and state.peers[place.peer].is_staying and is_synced(state, place, from_round)


def _filled(
    state: State,
    spec: RunSpec,
    index: int,
    held: Mapping[tuple[int, int], ReservedAssignment],
    spares: Sequence[ReservedAssignment],
) -> Chain | None:
    """The chain of `index`: by position who holds the place, else the first of `spares` that can; or None."""
    layout = state.layout(index)
    is_whole = len(layout) == 1
    options: list[list[ReservedAssignment]] = []
    for position, stages in enumerate(layout):
        holder = held.get((index, position))
        found = [holder] if holder is not None else []
        if not found and not is_whole:
            found = [
                ReservedAssignment(spare.peer, index, position, stages)
                for spare in spares
                if spare.stages == stages and fits(state, spec, spare.peer, stages, len(layout) - position)
            ]
        if not found:
            return None
        options.append(found)
    # No peer is an option for two positions, since each has other stages. Of two neighbours one must accept
    # connections: `reached` are, for both kinds of last member, the first choices that lead to it.
    reached: dict[bool, Chain] = {True: ()}
    for found in options:
        longer: dict[bool, Chain] = {}
        for place in found:
            accepts = bool(state.peers[place.peer].endpoint)
            for chain in reached.values():
                if accepts in longer:
                    break
                if not chain or can_be_neighbours(state.peers[chain[-1].peer], state.peers[place.peer]):
                    longer[accepts] = (*chain, place)
        reached = longer
    return next(iter(reached.values()), None)


def _leaves_spares(
    state: State,
    spec: RunSpec,
    run_view: Mapping[int, Replica],
    chains: Mapping[int, Chain],
    chain: Chain,
) -> bool:
    if len(chain) == 1:
        return True
    seated = {member.peer for replica in run_view.values() for member in replica.members}
    seated |= {place.peer for each in (*chains.values(), chain) for place in each}
    left = sum(peer.policy.joins_pipelines and peer.peer not in seated for peer in state.staying)
    return left >= spec.grouping.spares


def _replica(state: State, spec: RunSpec, index: int, chain: Chain) -> Replica:
    """With the k and the share of the work that it has in the newest plan."""
    members = tuple(Member(place.peer, place.stages, state.peers[place.peer].endpoint) for place in chain)
    former = next((each for each in state.plans[-1].replicas if each.index == index), None)
    if former is None:
        return Replica(index, members, links_between(members, spec.link.k))
    links = links_between(members, [link.k for link in former.links])
    return replace(former, members=members, links=links)


def _reasons(state: State, chosen: _Chosen, from_round: int) -> list[str]:
    """What changes and why, but for what only becomes faster."""
    newest = state.plans[-1]
    in_newest = {replica.index: replica for replica in newest.replicas}
    changes = []
    for index, chain in sorted(chosen.chains.items()):
        stand_ins = _stand_ins(state, chain, from_round)
        with_whom = f" with {listed(stand_ins)}" if stand_ins else ""
        former = in_newest.get(index)
        members = {member.peer for member in former.members} if former else set()
        if former and stand_ins and not members.isdisjoint(place.peer for place in chain):
            doing = "goes on"
        else:
            doing = "returns" if index in state.assigned_replicas else "joins"
        changes.append(f"replica-{index} {doing}{with_whom}")
    reasons = [listed(changes)] if changes else []
    dropped = [each for each in newest.replicas if each.index not in {*chosen.run_view, *chosen.chains}]
    for why, replicas in _by_cause(state, dropped).items():
        reasons.append(f"goes on without {listed(replicas)}, {why}")
    return reasons


def _stand_ins(state: State, chain: Chain, from_round: int) -> list[str]:
    """Such as "..ab for ..cd (stage 1), which is gone"."""
    holders = {place.slot: place.peer for place in state.reservations.values()}
    found = []
    for place in chain:
        holder = holders.get(place.slot)
        if holder == place.peer:
            continue
        instead = "nobody" if holder is None else short(holder)
        why = "" if holder is None else f", which {_trouble(state, holder, from_round)}"
        found.append(f"{short(place.peer)} for {instead} ({stages_of(place)}){why}")
    return found


def _trouble(state: State, peer: PeerId, from_round: int) -> str:
    known = state.peers[peer]
    if not known.is_live:
        return "is gone"
    if known.lifecycle is Lifecycle.DRAINING:
        return "drains"
    if peer_rests_until(state, peer) > from_round:
        return f"rests after {state.failures[peer][0]} failures"
    return "must catch up"


def _by_cause(state: State, dropped: Sequence[Replica]) -> dict[str, list[str]]:
    causes: dict[str, list[str]] = {}
    for replica in dropped:
        members = [state.peers[member.peer] for member in replica.members]
        if any(each.is_lost for each in members):
            why = "which lost a member"
        elif not all(each.is_staying for each in members):
            why = "of which a member drains"
        else:
            why = "which must catch up"
        causes.setdefault(why, []).append(replica.name)
    return causes


def complete_chains(state: State, spec: RunSpec) -> dict[int, list[ReservedAssignment]]:
    """By index the replicas whose places cover all stages with peers that stay, in order of position."""
    chains: dict[int, list[ReservedAssignment]] = {}
    for place in state.reservations.values():
        if state.peers[place.peer].is_staying:
            chains.setdefault(place.replica, []).append(place)
    complete = {}
    for index, places in chains.items():
        chain = sorted(places, key=lambda place: place.position)
        if [stage for place in chain for stage in place.stages] == list(range(spec.swarm.stages)):
            complete[index] = chain
    return complete


def shortages(state: State, spec: RunSpec, from_round: int) -> dict[int, str]:
    """What keeps replicas (by index) from training from `from_round` on, such as "replica-1 has lost Qm"."""
    chains: dict[int, dict[int, ReservedAssignment]] = {}
    for place in state.reservations.values():
        chains.setdefault(place.replica, {})[place.position] = place
    found = {}
    for index, chain in sorted(chains.items()):
        lacks = []
        for position, stages in enumerate(state.layout(index)):
            held = chain.get(position)
            if held is None:
                lacks.append(f"has nobody for {'stage' if len(stages) == 1 else 'stages'} {stages}")
                continue
            who = f"{short(held.peer)} ({stages_of(held)})"
            peer_rests = peer_rests_until(state, held.peer)
            if not state.peers[held.peer].is_live:
                lacks.append(f"has lost {who}")
            elif not state.peers[held.peer].is_staying:
                lacks.append(f"needs somebody for {who}, which drains")
            elif not is_synced(state, held, from_round):
                lacks.append(f"waits until {who} has caught up")
            elif peer_rests > from_round:
                times, _ = state.failures[held.peer]
                lacks.append(f"waits for {who}, which rests until round {peer_rests} after {times} failures")
        if not lacks and rests_until(state, index) > from_round:
            lacks.append(
                f"rests until round {rests_until(state, index)}, because its members could not go on"
            )
        if lacks:
            found[index] = f"replica-{index} {' and '.join(lacks[:_MOST_LACKS])}"
    return found
