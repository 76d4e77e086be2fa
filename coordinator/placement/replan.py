"""Makes the next plan: from the assignments that are reserved for peers, then faster by moves.

All replicas have bit-equal anchors after a round, so a peer can replace another one with the same stages at
once. A replica that has lost a member, or whose member drains, goes on with a spare that has followed the
rounds of these stages. Spares are the stage peers of pipelines that do not train. Those of the newest
pipeline, which is not complete yet, are taken first.

Pure functions: the same peers in another order give the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from coordinator.base.phrases import change_text, listed
from coordinator.placement.cost_model import Costs, Survey, bounded_seconds, survey_of
from coordinator.placement.reasons import reasons_of
from coordinator.placement.rules import (
    are_parted,
    can_be_neighbours,
    delivered_work,
    filled_replicas,
    fits,
    has_moved,
    is_synced,
    links_between,
    may_be_neighbours,
    member_obstacle,
    member_of,
    replica_rests_until,
    share_limits,
)
from coordinator.placement.samples import lost_from
from coordinator.placement.search import ExchangeMoves, exchange_members
from coordinator.placement.tuning import fit_k, share_out
from coordinator.run.state.records import peers_of
from coordinator.run.state.state import State
from protocol.math.sampling import next_first_sample
from protocol.spec.fixed import SETTLE_ROUNDS
from protocol.types import Member, PeerId, Plan, Replica, ReservedAssignment

ReservedChain = tuple[ReservedAssignment, ...]
"""The assignments of one replica in order of position, each with the peer that takes it."""
_Selection = tuple[dict[int, Replica], dict[int, ReservedChain], list[Replica]]
"""Replicas that go on as they are, those with peers at new positions, and all of them in order; by index."""


def next_plan(state: State, from_round: int, is_lost: bool = False) -> Plan | None:
    """The plan that takes over at `from_round`; None where the newest one stands, or no other is possible.

    Where no replica goes on, nobody has what was learned in the aborted rounds before: their samples are
    trained again. `is_lost`: the round before is one of them.

    A replica keeps its members if all of them take part and none drains. Another replica trains if each of
    its positions has a peer that has caught up and rested: the peer with the reservation, else a spare with
    the same stages. A pipeline that was never in a plan trains only if `grouping.spares` stage peers remain
    as spares.

    If no replica is left whose payloads count, peers and replicas need not rest and no spares are kept. If
    still none is left, members that drain keep their assignments.
    """
    newest = state.plans[-1]
    kept, rebuilt, replicas = _selection(state, from_round)
    if not replicas:
        return None
    # A replica that returns with the same members needs a plan, too: under the newest one it is broken.
    is_same = not rebuilt and len(kept) == len(newest.replicas)
    reasons = reasons_of(state, kept, rebuilt, from_round)
    replicas, rebalanced = _improved(state, replicas, from_round, is_same=is_same)
    first = from_round if kept else lost_from(state, from_round - is_lost)
    sample = next_first_sample(newest, state.spec, first)
    # A change whose round had no plan holds from this one on: the rounds between were trained without it.
    late = state.changes_until(from_round)[len(newest.changes) :]
    changes = (*newest.changes, *(replace(c, from_round=from_round, first_sample=sample) for c in late))
    if is_same and replicas == _lasting(newest) and changes == newest.changes:
        return None
    reasons += map(change_text, changes[len(newest.changes) :])
    if first < from_round:
        reasons.append(f"samples from round {first} on are trained again, because no replica has them")
    reason = "; ".join([*reasons, *rebalanced])
    return Plan(newest.epoch + 1, from_round, sample, tuple(replicas), reason, changes)


def _selection(state: State, from_round: int) -> _Selection:
    """The first selection with a replica whose payloads count, else the first with any replica.

    A stranger's replica alone must not let those rest without whose weight no round ends.
    """
    found: _Selection = {}, {}, []
    # Lenient: without rests and without keeping spares.
    for is_lenient, with_draining in ((False, False), (True, False), (True, True)):
        if with_draining:
            kept, rebuilt = _unbroken_replicas(state, with_draining, is_lenient), dict[int, ReservedChain]()
        else:
            kept, rebuilt = _select(state, from_round, is_lenient)
        indices = sorted([*kept, *rebuilt])
        replicas = [kept.get(each) or _rebuilt_replica(state, each, rebuilt[each]) for each in indices]
        if any(map(state.has_weight, replicas)):
            return kept, rebuilt, replicas
        found = found if found[-1] else (kept, rebuilt, replicas)
    return found


def _lasting(plan: Plan) -> list[Replica]:
    """The replicas as they begin later rounds than the first of `plan`, which is at the first step."""
    return [replace(each, resumes_at=0, resumed_in=0) if each.resumed_in else each for each in plan.replicas]


def _unbroken_replicas(state: State, with_draining: bool, is_lenient: bool) -> dict[int, Replica]:
    newest = state.plans[-1]
    absent = state.absent.get(newest.epoch, frozenset())  # of them also those that are back
    unbroken = (
        _at_present_addresses(state, replica)
        for replica in _lasting(newest)
        if not any(member.peer in absent or has_moved(state, replica, member) for member in replica.members)
        and (is_lenient or not are_parted(state, replica.members))
        and (with_draining or all(state.peers[member.peer].is_staying for member in replica.members))
    )
    return {
        replica.index: replica
        for replica in unbroken
        if all(can_be_neighbours(one, other) for one, other in pairwise(replica.members))
    }


def _at_present_addresses(state: State, replica: Replica) -> Replica:
    """`replica` with the endpoints that its members have now, and the dialling ends that follow from them."""
    members = tuple(member_of(state.peers[each.peer], each.stages) for each in replica.members)
    if members == replica.members:
        return replica
    return replace(replica, members=members, links=links_between(members, [link.k for link in replica.links]))


def _select(
    state: State, from_round: int, is_lenient: bool
) -> tuple[dict[int, Replica], dict[int, ReservedChain]]:
    """By index: the replicas that train on, and those that train again or for the first time."""
    kept = _unbroken_replicas(state, with_draining=False, is_lenient=is_lenient)
    ready = {
        reservation.slot: reservation
        for reservation in state.reservations.values()
        if reservation.replica not in kept
        and member_obstacle(state, reservation, from_round, is_lenient) is None
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
        chain = rebuilt_chain(state, index, ready, spares, is_lenient)
        if chain is None:
            rebuilt |= (mixed := _mixed(state, index, ready, kept))
            kept = {other: replica for other, replica in kept.items() if other not in mixed}
            taken = {reservation.peer for chain in mixed.values() for reservation in chain}
            ready = {slot: each for slot, each in ready.items() if each.peer not in taken}
            continue
        # A new pipeline must leave enough spares; a replica that has trained takes them.
        is_new = len(chain) > 1 and index not in state.assigned_replicas
        spares_left = _spares_left(state, kept, [*rebuilt.values(), chain])
        if is_new and not is_lenient and spares_left < state.spec.grouping.spares:
            continue
        rebuilt[index] = chain
        taken = {reservation.peer for reservation in chain}
        ready = {slot: each for slot, each in ready.items() if each.peer not in taken}
    return kept, rebuilt


def rebuilt_chain(
    state: State,
    index: int,
    ready: Mapping[tuple[int, int], ReservedAssignment],
    spares: Sequence[ReservedAssignment],
    is_lenient: bool,
) -> ReservedChain | None:
    """The members of replica `index`: at each position the ready peer with the reservation, else a spare.

    The first of `spares` that can be connected are taken. None where a position stays empty.
    """
    layout = state.layout(index)
    # One chain per kind of last peer is enough: only what neighbour_obstacle asks decides which peers can
    # follow. No peer can be at two positions, since these have different stages.
    with_failures = {peer for ends in state.failed_links for peer in ends}
    chains: dict[tuple[bool, bool, str], ReservedChain] = {(True, True, ""): ()}
    for position, stages in enumerate(layout):
        holder = ready.get((index, position))
        options = [] if holder is None else [holder]
        if holder is None or holder.peer in with_failures or state.is_unproven(holder.peer):
            # Spares are stage peers, which cannot be a full replica.
            same = [spare for spare in spares if len(layout) > 1 and spare.stages == stages]
            able = (spare.peer for spare in same if fits(state, spare.peer, stages, len(layout) - position))
            options += [ReservedAssignment(peer, index, position, stages) for peer in able]
        longer: dict[tuple[bool, bool, str], ReservedChain] = {}
        for option in options:
            peer = state.peers[option.peer]
            for chain in chains.values():
                last = state.peers[chain[-1].peer] if chain else None
                if last is None or may_be_neighbours(state, last, peer, is_lenient):
                    own_links = peer.peer if peer.peer in with_failures else ""
                    kind = bool(peer.endpoint), state.is_unproven(peer.peer), own_links
                    longer.setdefault(kind, (*chain, option))
        chains = longer
    return next(iter(chains.values()), None)


def _mixed(
    state: State, index: int, ready: Mapping[tuple[int, int], ReservedAssignment], kept: Mapping[int, Replica]
) -> dict[int, ReservedChain]:
    """Replica `index`, whose members are apart, and one that trains, with every second member exchanged.

    All have the anchors of their stages, so no member fetches any. Empty where no exchange is possible.
    """
    layout = state.layout(index)
    own = [ready[index, position] for position in range(len(layout)) if (index, position) in ready]
    if len(own) < len(layout) or not are_parted(state, own):
        return {}
    for other in sorted(kept, reverse=True):
        theirs = [ReservedAssignment(m.peer, other, at, m.stages) for at, m in enumerate(kept[other].members)]
        if [each.stages for each in theirs] != list(layout):
            continue
        pairs = [(a, b) if at % 2 == 0 else (b, a) for at, (a, b) in enumerate(zip(own, theirs, strict=True))]
        found = {
            to: tuple(replace(pair[side], replica=to) for pair in pairs)
            for side, to in ((0, index), (1, other))
        }
        links = (ends for chain in found.values() for ends in pairwise(chain))
        able = (fits(state, e.peer, e.stages, len(layout) - e.position) for c in found.values() for e in c)
        if all(may_be_neighbours(state, state.peers[a.peer], state.peers[b.peer]) for a, b in links) and all(
            able
        ):
            return found
    return {}


def _spares_left(state: State, kept: Mapping[int, Replica], rebuilt: Sequence[ReservedChain]) -> int:
    """How many stage peers would have no assignment."""
    assigned = {member.peer for replica in kept.values() for member in replica.members}
    assigned |= {reservation.peer for chain in rebuilt for reservation in chain}
    return sum(peer.policy.joins_pipelines and peer.peer not in assigned for peer in state.staying)


def _rebuilt_replica(state: State, index: int, chain: ReservedChain) -> Replica:
    """The replica of `chain`, with the k and the share of the work that `index` has in the newest plan."""
    members = tuple(member_of(state.peers[each.peer], each.stages) for each in chain)
    former = next((each for each in state.plans[-1].replicas if each.index == index), None)
    if former is None:
        return Replica(index, members, links_between(members, state.spec.link.k))
    links = links_between(members, [each.k for each in former.links])
    return replace(former, members=members, links=links, resumes_at=0, resumed_in=0)


def _improved(
    state: State, replicas: Sequence[Replica], from_round: int, is_same: bool
) -> tuple[list[Replica], list[str]]:
    """`replicas` with faster members, k and shares, and sentences that say what changes and why.

    These changes move no state, since anchors are bit-equal on all replicas after a round; where nothing is
    measured, nothing changes. Members change places only if `is_same`, which means that no replica comes
    or goes with this plan, and only after a first commit, since no share could follow before.
    """
    spec, survey, delivered = state.spec, survey_of(state), delivered_work(state)
    newest = state.plans[-1].replicas
    may_change = not state.rebalanced_at or from_round - state.rebalanced_at >= SETTLE_ROUNDS
    result, reasons = list(replicas), list[str]()
    if is_same and may_change and delivered:
        moves = ExchangeMoves(
            spec,
            survey,
            result,
            [each.index for each in result if _may_exchange(state, each, from_round)],
            _spares(state, from_round),
            lambda member, members_left: fits(state, member.peer, member.stages, members_left),
            partial(may_be_neighbours, state),
        )
        result, exchanges = exchange_members(spec, result, moves)
        reasons += [exchanges] if exchanges else []
    result, widths = fit_k(spec, survey, result, {each.index for each in newest}, from_round)
    reasons += [listed(widths)] if widths else []
    # Shares are chosen last: they depend on the members and on k.
    are_changed = [*map(peers_of, result)] != [*map(peers_of, newest)]
    if are_changed or may_change:
        seconds = _microbatch_seconds(state, survey, result, from_round)
        limits = share_limits(state, result, delivered)
        result, shares = share_out(spec, result, seconds, limits, are_changed)
        reasons += shares
    return result, reasons


def _microbatch_seconds(
    state: State, survey: Survey, replicas: Sequence[Replica], from_round: int
) -> list[float]:
    """Seconds of a microbatch on each of `replicas`: measured, else predicted; 0 where nothing is known."""
    # A report before the first decision of a round may be about the round before it: so for chains of both.
    earlier, newest = state.plan_for(max(1, from_round - 2)).replicas, state.plans[-1].replicas
    in_both, costs = set(map(_chain, earlier)) & set(map(_chain, newest)), Costs(state.spec, survey)

    def seconds(replica: Replica) -> float:
        measured = state.estimates[replica.members[0].peer].microbatch_seconds
        if measured > 0 and _chain(replica) in in_both:
            return bounded_seconds(measured)
        return costs.seconds_per_microbatch(*_chain(replica))

    return [*map(seconds, replicas)]


def _chain(replica: Replica) -> tuple[tuple[Member, ...], tuple[int, ...]]:
    return replica.members, tuple(link.k for link in replica.links)


def _may_exchange(state: State, replica: Replica, from_round: int) -> bool:
    """Whether all members of a pipeline stay, have measured their speed and are in sync."""
    return len(replica.members) > 1 and all(
        state.peers[each.peer].is_staying
        and _is_measured(state, each.peer)
        and is_synced(state, each, from_round)
        for each in replica.members
    )


def _spares(state: State, from_round: int) -> list[Member]:
    """Peers that follow the rounds of their stages, have measured their speed and could train at once."""
    assigned = state.assignments[state.plans[-1].epoch]
    waiting = (each for each in state.reservations.values() if each.peer not in assigned)
    return [
        member_of(state.peers[each.peer], each.stages)
        for each in waiting
        if state.peers[each.peer].policy.joins_pipelines
        and _is_measured(state, each.peer)
        and member_obstacle(state, each, from_round) is None
    ]


def _is_measured(state: State, peer: PeerId) -> bool:
    return state.estimates[peer].capacity.flops > 0
