"""Other roles for peers that leave their role to the coordinator, while the run trains.

- A stage peer that waits for partners and carries the whole model becomes a full replica.
- A full replica becomes a stage peer if that completes a pipeline of peers that wait, and the chain is not
  slower than the replica alone. Others must go on training meanwhile.

A change costs the peer its local progress, and perhaps a download. So at most one peer changes per round, and
a peer waits twice as long before each further change: two roles cannot alternate for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from coordinator.placement.cost_model import compute_seconds, seconds_per_microbatch, survey_of
from coordinator.placement.eligibility import is_synced, peer_rests_until
from coordinator.placement.links import member_of
from coordinator.placement.replan import filled_replicas, next_plan
from coordinator.placement.roles import whole_model_obstacle
from coordinator.placement.vacancies import Vacancies, Vacancy
from coordinator.state.events import AssignmentReserved, RoleChanged
from coordinator.state.state import Peer, State
from coordinator.state.text import short, stages_of
from coordinator.state.transaction import Transaction
from protocol.types import Plan, ReservedAssignment, Role, StageRange

_PATIENCE = 2
"""Times `grouping.settle_rounds`: stage moves and spares have their turn first."""
_MOST_DOUBLINGS = 5


def change_roles(transaction: Transaction, from_round: int) -> None:
    """Give at most one flexible peer another role and a reservation; called before the plan of `from_round`.

    No effect shortly before the end of the run: the peer would not train again.
    """
    state = transaction.state
    flexible = [peer for peer in state.staying if peer.is_flexible and _has_settled(state, peer)]
    is_late = from_round + state.spec.grouping.settle_rounds > state.spec.rounds
    if not flexible or is_late or state.stages == 1:
        return
    changes = _to_full_replica(transaction, flexible) or _to_stage_peer(transaction, flexible, from_round)
    for event in changes:
        transaction.add(event)


def _has_settled(state: State, peer: Peer) -> bool:
    patience = _PATIENCE * state.spec.grouping.settle_rounds << min(peer.role_changes, _MOST_DOUBLINGS)
    return state.current_round >= peer.waits_since + patience


def _to_full_replica(
    transaction: Transaction, flexible: Sequence[Peer]
) -> tuple[RoleChanged | AssignmentReserved, ...]:
    """The change of the stage peer that has waited longest for partners; empty where there is none."""
    state = transaction.state
    assigned, complete = state.assignments[state.plans[-1].epoch], filled_replicas(state)
    spares = sum(peer.policy.joins_pipelines and peer.peer not in assigned for peer in state.staying)
    if spares <= state.spec.grouping.spares:
        return ()
    for peer in sorted(flexible, key=lambda each: (each.waits_since, each.arrival)):
        reserved = state.reservations.get(peer.peer)
        waits = reserved is None or reserved.replica not in complete
        if not peer.policy.joins_pipelines or peer.peer in assigned or not waits:
            continue
        if whole_model_obstacle(state, peer):
            continue
        reason = f"it has waited for partners since round {peer.waits_since}, and carries the whole model"
        changed = RoleChanged(transaction.now, peer.peer, Role.REPLICA, reason)
        trial = Transaction(state, transaction.now)
        trial.add(changed)
        reservation = Vacancies(trial.state).reservation_for(trial.state.peers[peer.peer])
        if reservation is not None:
            return changed, AssignmentReserved(transaction.now, reservation)
    return ()


def _to_stage_peer(
    transaction: Transaction, flexible: Sequence[Peer], from_round: int
) -> tuple[RoleChanged | AssignmentReserved, ...]:
    """The change of a full replica that completes a waiting pipeline; empty where there is none."""
    state = transaction.state
    assigned = state.assignments[state.plans[-1].epoch]
    alone = [peer for peer in flexible if not peer.policy.joins_pipelines]
    # Those that do not train yet come first, then those that have joined last.
    alone.sort(key=lambda peer: (peer.peer in assigned, -peer.arrival))
    vacancies = Vacancies(state)
    for hole, partners in _holes(state, vacancies, from_round) if alone else ():
        for peer in alone:
            if not vacancies.suits(hole, peer) or not _is_worth_it(state, peer, hole, partners):
                continue
            reason = (
                f"replica-{hole.replica} lacks only a peer for {stages_of(hole)}, and "
                f"{short(partners[0].peer)} waits there"
            )
            changes = (
                RoleChanged(transaction.now, peer.peer, Role.STAGE, reason),
                AssignmentReserved(transaction.now, hole.reserved_for(peer.peer)),
            )
            if peer.peer not in assigned or _others_train_on(transaction, changes, from_round):
                return changes
    return ()


def _holes(
    state: State, vacancies: Vacancies, from_round: int
) -> Iterator[tuple[Vacancy, list[ReservedAssignment]]]:
    """The only vacancy of each pipeline of which all other members wait and could train, and these."""
    assigned = state.assignments[state.plans[-1].epoch]
    lacking = Counter(each.replica for each in vacancies.vacant)
    for hole in vacancies.vacant:
        if lacking[hole.replica] > 1 or len(state.layout(hole.replica)) == 1:
            continue
        partners = [
            each
            for each in state.reservations.values()
            if each.replica == hole.replica and each.slot != hole.slot
        ]
        if all(
            each.peer not in assigned
            and _has_settled(state, state.peers[each.peer])
            and is_synced(state, each, from_round)
            and peer_rests_until(state, each.peer) <= from_round
            for each in partners
        ):
            yield hole, sorted(partners, key=lambda each: each.position)


def _is_worth_it(state: State, peer: Peer, hole: Vacancy, partners: Sequence[ReservedAssignment]) -> bool:
    """Whether the chain with `peer` is not slower than `peer` alone, as far as that is known."""
    survey = survey_of(state)
    chain = sorted([*partners, hole.reserved_for(peer.peer)], key=lambda each: each.position)
    members = [member_of(state.peers[each.peer], each.stages) for each in chain]
    # As initial_chains: k widens later, as far as the links carry it.
    ks = [state.spec.link.possible_ks[0]] * (len(members) - 1)
    together = seconds_per_microbatch(state.spec, survey, members, ks)
    return (
        together <= compute_seconds(state.spec, survey, peer.peer, StageRange(0, state.stages))
        or not together
    )


def _others_train_on(
    transaction: Transaction, changes: Sequence[RoleChanged | AssignmentReserved], from_round: int
) -> bool:
    """Whether a replica of the newest plan trains on without the peer of `changes`."""
    trial = Transaction(transaction.state, transaction.now)
    for event in changes:
        trial.add(event)
    plan, newest = next_plan(trial.state, from_round), transaction.state.plans[-1]
    kept = {each.index for each in newest.replicas}
    return isinstance(plan, Plan) and any(each.index in kept for each in plan.replicas)
