"""Makes the next plan from the assignments that are reserved for peers.

All replicas have bit-equal anchors after a round, so a peer can replace another one with the same stages at
once. A replica that has lost a member, or whose member drains, goes on with a spare that has followed the
rounds of these stages. Spares are the stage peers of pipelines that do not train. Those of the newest
pipeline, which is not complete yet, are taken first.

Pure functions: the same peers in another order give the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.placement.eligibility import fits, is_synced, peer_rests_until, replica_rests_until
from coordinator.placement.links import can_be_neighbours, links_between
from coordinator.placement.rebalance import Rebalance
from coordinator.state.state import State, stages_of
from coordinator.state.text import Waiting, listed, short
from protocol.spec.run import RunSpec
from protocol.types import Lifecycle, Member, Plan, Replica, ReservedAssignment

_MOST_OBSTACLES = 2
"""A message names at most this many obstacles of a replica."""

ReservedChain = tuple[ReservedAssignment, ...]
"""The assignments of one replica in order of position, each with the peer that takes it."""


def next_plan(
    state: State, spec: RunSpec, epoch: int, from_round: int, first_sample: int
) -> Plan | Waiting | None:
    """The plan that takes over at `from_round`; None where the newest plan is still right.

    A replica keeps its members if all of them take part and none drains. Another replica trains if each of
    its positions has a peer that has caught up and rested: the peer with the reservation, else a spare with
    the same stages. A pipeline that was never in a plan trains only if `grouping.spares` stage peers remain
    as spares.

    If no replica is left, peers and replicas need not rest and no spares are kept. If still none is left,
    members that drain keep their assignments.
    """
    newest = state.plans[-1]
    selection = _selection(state, spec, from_round)
    if selection.is_empty:
        return Waiting(f"no complete replica is left: {listed([*obstacles(state, from_round).values()])}")
    replicas = [
        selection.kept.get(index) or _rebuilt_replica(state, spec, index, selection.rebuilt[index])
        for index in sorted([*selection.kept, *selection.rebuilt])
    ]
    # A replica that returns with the same members needs a plan, too: under the newest one it is broken.
    is_same = not selection.rebuilt and len(selection.kept) == len(newest.replicas)
    reasons = _reasons(state, selection, from_round)
    replicas, rebalanced = Rebalance(state, spec, from_round).run(replicas, is_settled=is_same)
    if is_same and replicas == list(newest.replicas):
        return None
    return Plan(epoch, from_round, first_sample, tuple(replicas), "; ".join([*reasons, *rebalanced]))


@dataclass(frozen=True)
class _Selection:
    """The replicas that train next, by index; those in `rebuilt` may have new members."""

    kept: Mapping[int, Replica]
    rebuilt: Mapping[int, ReservedChain] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.kept and not self.rebuilt


def _selection(state: State, spec: RunSpec, from_round: int) -> _Selection:
    for is_lenient in (False, True):  # lenient: without rests and without keeping spares
        selection = _select(state, spec, from_round, is_lenient)
        if not selection.is_empty:
            return selection
    return _Selection(_unbroken_replicas(state, with_draining=True))


def _unbroken_replicas(state: State, with_draining: bool) -> dict[int, Replica]:
    newest = state.plans[-1]
    # A member that was absent under this plan breaks its replica even when it is back.
    absent = state.absent.get(newest.epoch, frozenset())
    return {
        replica.index: replica
        for replica in newest.replicas
        if not any(member.peer in absent for member in replica.members)
        and (with_draining or all(state.peers[member.peer].is_staying for member in replica.members))
    }


def _select(state: State, spec: RunSpec, from_round: int, is_lenient: bool) -> _Selection:
    kept = _unbroken_replicas(state, with_draining=False)
    ready = {
        reservation.slot: reservation
        for reservation in state.reservations.values()
        if reservation.replica not in kept and _is_ready(state, reservation, from_round, is_lenient)
    }
    # A replica that has trained before comes first, and takes its spares from those that come after it.
    waiting = sorted(
        {reservation.replica for reservation in state.reservations.values()} - kept.keys(),
        key=lambda index: (index not in state.assigned_replicas, index),
    )
    complete = filled_replicas(state)
    rebuilt: dict[int, ReservedChain] = {}
    for turn, index in enumerate(waiting):
        if replica_rests_until(state, index) > from_round and not is_lenient:
            continue
        later = {other: rank for rank, other in enumerate(waiting[turn + 1 :])}
        spares = [reservation for reservation in ready.values() if reservation.replica in later]
        # Incomplete replicas give first, the last of them before others, since they train last in any case.
        spares.sort(key=lambda each: (each.replica in complete, -later[each.replica], each.position))
        chain = _rebuilt_chain(state, spec, index, ready, spares)
        if chain is None:
            continue
        # A new pipeline must leave enough spares; a replica that has trained takes them.
        needs_spares = len(chain) > 1 and not is_lenient and index not in state.assigned_replicas
        if needs_spares and _spares_left(state, kept, [*rebuilt.values(), chain]) < spec.grouping.spares:
            continue
        rebuilt[index] = chain
        taken = {reservation.peer for reservation in chain}
        ready = {slot: each for slot, each in ready.items() if each.peer not in taken}
    return _Selection(kept, rebuilt)


def _is_ready(state: State, reservation: ReservedAssignment, from_round: int, is_lenient: bool) -> bool:
    has_rested = is_lenient or peer_rests_until(state, reservation.peer) <= from_round
    return (
        has_rested and state.peers[reservation.peer].is_staying and is_synced(state, reservation, from_round)
    )


def _rebuilt_chain(
    state: State,
    spec: RunSpec,
    index: int,
    ready: Mapping[tuple[int, int], ReservedAssignment],
    spares: Sequence[ReservedAssignment],
) -> ReservedChain | None:
    """The members of replica `index`: at each position the ready peer with the reservation, else a spare.

    The first of `spares` that can be connected are taken. None where a position stays empty.
    """
    layout = state.layout(index)
    # One chain per kind of last peer (with an endpoint or without) is enough: only that decides which peers
    # can follow. No peer can be at two positions, since these have different stages.
    chains: dict[bool, ReservedChain] = {True: ()}
    for position, stages in enumerate(layout):
        if (index, position) in ready:
            options = [ready[index, position]]
        else:
            options = [
                ReservedAssignment(spare.peer, index, position, stages)
                for spare in spares
                if len(layout) > 1  # spares are stage peers, which cannot be a full replica
                and spare.stages == stages
                and fits(state, spec, spare.peer, stages, len(layout) - position)
            ]
        longer: dict[bool, ReservedChain] = {}
        for option in options:
            peer = state.peers[option.peer]
            for chain in chains.values():
                if not chain or can_be_neighbours(state.peers[chain[-1].peer], peer):
                    longer.setdefault(bool(peer.endpoint), (*chain, option))
        chains = longer
    return next(iter(chains.values()), None)


def _spares_left(state: State, kept: Mapping[int, Replica], rebuilt: Sequence[ReservedChain]) -> int:
    """How many stage peers would have no assignment."""
    assigned = {member.peer for replica in kept.values() for member in replica.members}
    assigned |= {reservation.peer for chain in rebuilt for reservation in chain}
    return sum(peer.policy.joins_pipelines and peer.peer not in assigned for peer in state.staying)


def _rebuilt_replica(state: State, spec: RunSpec, index: int, chain: ReservedChain) -> Replica:
    """The replica of `chain`, with the k and the share of the work that `index` has in the newest plan."""
    members = tuple(Member(each.peer, each.stages, state.peers[each.peer].endpoint) for each in chain)
    former = next((each for each in state.plans[-1].replicas if each.index == index), None)
    if former is None:
        return Replica(index, members, links_between(members, spec.link.k))
    return replace(former, members=members, links=links_between(members, [link.k for link in former.links]))


def _reasons(state: State, selection: _Selection, from_round: int) -> list[str]:
    """Sentences for the replicas that join, return or are left out, and why."""
    newest = {replica.index: replica for replica in state.plans[-1].replicas}
    changes = []
    for index, chain in sorted(selection.rebuilt.items()):
        replaced = _replacements(state, chain, from_round)
        members = {member.peer for member in newest[index].members} if index in newest else set()
        change = "returns" if index in state.assigned_replicas else "joins"
        if replaced and not members.isdisjoint(reservation.peer for reservation in chain):
            change = "goes on"  # some of its members stay
        changes.append(f"replica-{index} {change}{f' with {listed(replaced)}' if replaced else ''}")
    left_out: dict[str, list[str]] = {}
    for index, replica in newest.items():
        if index not in selection.kept and index not in selection.rebuilt:
            left_out.setdefault(_why_left_out(state, replica), []).append(replica.name)
    return [
        *([listed(changes)] if changes else []),
        *(f"goes on without {listed(names)}, {why}" for why, names in left_out.items()),
    ]


def _replacements(state: State, chain: ReservedChain, from_round: int) -> list[str]:
    """For each member that is new at its position, such as "..ab for ..cd (stage 1), which is gone"."""
    holders = {reservation.slot: reservation for reservation in state.reservations.values()}
    found = []
    for reservation in chain:
        holder = holders.get(reservation.slot)
        if holder is None:
            found.append(f"{short(reservation.peer)} in a vacancy ({stages_of(reservation)})")
        elif holder.peer != reservation.peer:
            why = _obstacle(state, holder, from_round)
            former = f"{short(holder.peer)} ({stages_of(holder)}){f', {why}' if why else ''}"
            found.append(f"{short(reservation.peer)} for {former}")
    return found


def _why_left_out(state: State, replica: Replica) -> str:
    members = [state.peers[member.peer] for member in replica.members]
    if any(each.is_lost for each in members):
        return "which lost a member"
    return "which must catch up" if all(each.is_staying for each in members) else "of which a member drains"


def filled_replicas(state: State) -> set[int]:
    """The replicas of which each position is reserved for a peer that stays."""
    filled: dict[int, set[int]] = {}
    for each in state.reservations.values():
        if state.peers[each.peer].is_staying:
            filled.setdefault(each.replica, set()).add(each.position)
    return {index for index, positions in filled.items() if len(positions) == len(state.layout(index))}


def obstacles(state: State, from_round: int) -> dict[int, str]:
    """By index: why a replica cannot train, such as "replica-1 waits for ..Qm (stage 1), which is gone"."""
    reserved = {reservation.slot: reservation for reservation in state.reservations.values()}
    found = {}
    for index in sorted({replica for replica, _ in reserved}):
        sentences = []
        for position, stages in enumerate(state.layout(index)):
            holder = reserved.get((index, position))
            if holder is None:
                sentences.append(f"has no peer for {'stage' if len(stages) == 1 else 'stages'} {stages}")
            elif why := _obstacle(state, holder, from_round):
                sentences.append(f"waits for {short(holder.peer)} ({stages_of(holder)}), {why}")
        rests = replica_rests_until(state, index)
        if not sentences and rests > from_round:
            sentences.append(f"rests until round {rests}, because its members could not go on")
        if sentences:
            found[index] = f"replica-{index} {' and '.join(sentences[:_MOST_OBSTACLES])}"
    return found


def _obstacle(state: State, reservation: ReservedAssignment, from_round: int) -> str:
    """Why the peer of `reservation` cannot train from `from_round` on; "" where it can."""
    peer, rests = state.peers[reservation.peer], peer_rests_until(state, reservation.peer)
    if not peer.is_live:
        return "which is gone"
    if peer.lifecycle is Lifecycle.DRAINING:
        return "which drains"
    if rests > from_round:
        return f"which rests until round {rests} after {state.failures[peer.peer][0]} failures"
    return "" if is_synced(state, reservation, from_round) else "which must catch up"
