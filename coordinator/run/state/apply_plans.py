"""Changes of the state when a plan is adopted or an assignment is reserved."""

from __future__ import annotations

from collections.abc import Mapping, Set

from coordinator.base.persistent_map import PersistentMap
from coordinator.base.replacing import replace
from coordinator.run.state import events
from coordinator.run.state.apply_peers import count_failure
from coordinator.run.state.records import Assignment, FailedLink, Peer, peers_of
from coordinator.run.state.state import KEPT_DECISIONS, KEPT_ROUNDS, State
from protocol.status import RunPhase
from protocol.types import Lifecycle, PeerId, Plan, Replica, ReservedAssignment


def reserve(state: State, event: events.AssignmentReserved) -> State:
    """The reservation replaces the former one of its peer, and any other peer's for the same slot.

    Another peer that stays, but does not follow the rounds, loses it by a failure of its own.
    """
    reservation, recent = event.reservation, max(0, state.current_round - 2)
    for peer, held in state.reservations.items():
        is_replaced = held.slot == reservation.slot and peer != reservation.peer
        if is_replaced and state.peers[peer].is_staying and not state.has_attested(peer, recent):
            state = count_failure(state, peer)
    others = state.reservations.keep(
        lambda peer, former: peer != reservation.peer and former.slot != reservation.slot
    )
    former = state.reservations.get(reservation.peer)
    if former is not None and former.stages != reservation.stages:
        rounds = state.synced.get(reservation.peer, {})
        # The peer rebuilds its stages: it keeps the anchors of the common ones and drops the rest.
        kept = {
            stage: n for stage, n in rounds.items() if stage in former.stages and stage in reservation.stages
        }
        state = replace(
            state,
            moved_at={**state.moved_at, reservation.peer: state.current_round},
            synced=state.synced.set(reservation.peer, kept),
        )
    if former != reservation:
        state = replace(state, promised=state.promised.set(reservation.peer, event.at))
    is_whole = len(reservation.stages) == state.stages
    layout = (reservation.stages,) if is_whole else state.layout(reservation.replica)
    return replace(
        state,
        reservations=others.set(reservation.peer, reservation),
        layouts={reservation.replica: layout, **state.layouts},  # an existing layout never changes
    )


def with_shared_replicas(plan: Plan, former: Plan | None) -> Plan:
    """An equal plan with the very records of the replicas and members that `former` has as well.

    Plans are kept as long as the run goes on, and most members of a large swarm stay as they are.
    """
    known = {each.index: each for each in former.replicas} if former else {}
    members = {member.peer: member for each in known.values() for member in each.members}

    def shared(replica: Replica) -> Replica:
        same = known.get(replica.index)
        if same is not None and same == replica:
            return same
        known_members = ((each, members.get(each.peer, each)) for each in replica.members)
        own = tuple(former if former == each else each for each, former in known_members)
        return replace(replica, members=own)

    return replace(plan, replicas=tuple(map(shared, plan.replicas)))


def adopt(state: State, event: events.PlanAdopted) -> State:
    """The first plan starts round 1. A plan for the current round starts that round anew, or repairs it."""
    plan = with_shared_replicas(event.plan, state.plans[-1] if state.plans else None)
    assignments = {
        member.peer: Assignment(replica, position)
        for replica in plan.replicas
        for position, member in enumerate(replica.members)
    }
    # The plan of the next round exists while the current round is still applied. A peer without an assignment
    # in it stays TRAINING until it has finished the current round.
    is_later = plan.from_round > state.current_round > 0
    busy = {each for each in state.peers if is_later and state.takes_part(each, state.current_round)}
    still_absent = _still_absent(state, plan, assignments)
    peers = with_lifecycles(
        state, assignments.keys() - still_absent, assignments.keys() - still_absent | busy
    )
    layouts = {replica.index: tuple(each.stages for each in replica.members) for replica in plan.replicas}
    # Another chain has another speed; in a round that goes on, the former one's tells most.
    former = {each.index: peers_of(each) for each in (state.plans[-1].replicas if state.plans else ())}
    same = {each.index for each in plan.replicas if former.get(each.index) == peers_of(each)}
    kept = {each.index for each in plan.replicas} if plan.repairs else same
    state = replace(
        state,
        first_spec=state.first_spec or (state.spec if plan.changes else None),
        phase=RunPhase.TRAINING,
        peers=peers,
        reservations=_reservations_under(state, assignments),
        plans=(*kept_plans(state.plans, state.current_round), plan),
        assigned_replicas=state.assigned_replicas | {replica.index for replica in plan.replicas},
        layouts={**state.layouts, **layouts},
        phase_seconds=state.phase_seconds.keep(lambda index, _: index in kept),
        barren={key: each for key, each in state.barren.items() if key[0] in same},
        rebalanced_at=plan.from_round if _is_rebalance(state, plan, assignments) else state.rebalanced_at,
        current_round=state.current_round or plan.from_round,
        absent={**state.absent, plan.epoch: still_absent} if still_absent else state.absent,
        failed_links=_failed_under(state, plan),
    )
    round_number = state.current_round
    if plan.from_round == round_number and not plan.repairs:
        state = with_settings(state)
        # Offers of the former plan are void: its samples were divided among other replicas.
        rounds = {key: round_state for key, round_state in state.rounds.items() if key[1] != round_number}
        state = replace(state, began_at=event.at, opened_at=None, answered=PersistentMap(), rounds=rounds)
        state = replace(state, breaks={})
        if state.pause is not None:  # a round that starts anew would be a new inner phase
            pause = replace(state.pause, from_round=min(round_number, state.pause.from_round))
            state = replace(state, pause=pause)
    running = state.plan_for(round_number).epoch
    oldest = state.plan_for(round_number - KEPT_ROUNDS).epoch
    return replace(
        state,
        assignments={epoch: each for epoch, each in state.assignments.items() if epoch >= oldest}
        | {plan.epoch: assignments},
        # Which members were absent under a plan no longer matters when its last round is over.
        absent={epoch: each for epoch, each in state.absent.items() if epoch >= running},
    )


def _still_absent(state: State, plan: Plan, assignments: Mapping[PeerId, Assignment]) -> frozenset[PeerId]:
    """The members that are absent under `plan` from its beginning: of replicas that it does not repair."""
    if not plan.repairs:
        return frozenset()
    former, absent = state.assignments[state.epoch], state.absent.get(state.epoch, frozenset())
    return frozenset(peer for peer in absent if former.get(peer) == assignments.get(peer) is not None)


def _failed_under(state: State, plan: Plan) -> Mapping[tuple[PeerId, PeerId], FailedLink]:
    """The failed links; those of replicas that a repair leaves broken fail under `plan`, too."""
    if not plan.repairs or not state.failed_links:
        return state.failed_links
    former = {each.index: each for each in state.plans[-1].replicas}
    left = {each.index for each in plan.replicas if former.get(each.index) == each}
    return {
        ends: replace(link, epoch=plan.epoch) if link.epoch == state.epoch and link.replica in left else link
        for ends, link in state.failed_links.items()
    }


def with_settings(state: State) -> State:
    """`state` with the settings of the newest plan, whose first round begins."""
    if (spec := state.spec_under(state.plans[-1])) == state.spec:
        return state
    longer = spec.inner.steps / state.spec.inner.steps
    known = {index: tuple(longer * each for each in phases) for index, phases in state.phase_seconds.items()}
    return replace(state, spec=spec, phase_seconds=state.phase_seconds.update(known))


def kept_plans(plans: tuple[Plan, ...], round_number: int) -> tuple[Plan, ...]:
    """Those of `plans` under which `round_number` or one of the KEPT_DECISIONS rounds before it runs."""
    ended = sum(1 for following in plans[1:] if following.from_round <= round_number - KEPT_DECISIONS)
    return plans[ended:]


def with_lifecycles(
    state: State, assigned: Set[PeerId], training: Set[PeerId]
) -> PersistentMap[PeerId, Peer]:
    """All peers: those `assigned` get TRAINING, all others except those in `training` get SYNCING."""
    changes = {}
    for each in state.peers.values():
        if each.is_staying and each.lifecycle is not Lifecycle.TRAINING and each.peer in assigned:
            changes[each.peer] = replace(each, lifecycle=Lifecycle.TRAINING)
        elif each.is_staying and each.lifecycle is not Lifecycle.SYNCING and each.peer not in training:
            changes[each.peer] = replace(each, lifecycle=Lifecycle.SYNCING, waits_since=state.current_round)
    return state.peers.update(changes)


def _reservations_under(
    state: State, assignments: Mapping[PeerId, Assignment]
) -> PersistentMap[PeerId, ReservedAssignment]:
    """Reservations under a new plan: each assigned peer that stays gets its assignment reserved.

    A peer whose slot went to another peer becomes a spare, and gets a free slot with the same stages if there
    is one. A peer that is gone also keeps or gets a reservation, for its return.
    """
    reservations = {
        peer: ReservedAssignment(
            peer, assignment.replica.index, assignment.position, assignment.member.stages
        )
        for peer, assignment in assignments.items()
        if state.peers[peer].is_staying
    }
    taken = {reservation.slot for reservation in reservations.values()}
    # Slots that an assigned peer has left, for example a spare that fills a vacancy.
    former = [state.reservations[peer] for peer in reservations if peer in state.reservations]
    free = sorted((each for each in former if each.slot not in taken), key=lambda each: each.slot)
    for peer, reservation in sorted(state.reservations.items()):
        if peer in reservations:
            continue
        if reservation.slot not in taken:
            reservations[peer] = reservation
            continue
        # Other stages would make the peer fetch their anchors.
        found = next((each for each in free if each.stages == reservation.stages), None)
        if found is not None:
            free.remove(found)
            reservations[peer] = replace(found, peer=peer)
    return PersistentMap(reservations)


def _is_rebalance(state: State, plan: Plan, assignments: Mapping[PeerId, Assignment]) -> bool:
    """Whether `plan` only makes the run faster: it exchanges members or divides the microbatches anew.

    Changes that the loss of a member makes necessary do not count.
    """
    if not state.plans or plan.repairs:
        return False
    newest = state.plans[-1]
    absent = state.absent.get(newest.epoch, frozenset())
    later = {replica.index: replica for replica in plan.replicas}
    kept = [(each, later[each.index]) for each in newest.replicas if each.index in later]
    exchanged = any(
        before.peer != after.peer and before.peer not in absent and state.peers[before.peer].is_staying
        for one, other in kept
        for before, after in zip(one.members, other.members, strict=True)
    )
    shares = any(
        one.microbatches != other.microbatches
        for one, other in kept
        if not any(member.peer in absent for member in one.members)
    )
    return exchanged or (shares and len(kept) == len(newest.replicas) == len(plan.replicas))
