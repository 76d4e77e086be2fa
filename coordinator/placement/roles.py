"""Chooses the role of each peer that leaves it to the coordinator.

A peer becomes a full replica if it carries the whole model: its memory holds all stages, its line sends a
payload of all stages within the time of a round, and it computes a round in about the time of the others.
Another peer becomes a stage peer. What a peer has not measured is no obstacle, except its memory.

While the run trains, at most one peer per round gets another role, since a change costs it its local progress
and perhaps a download; and it waits twice as long before each further change, so that two roles cannot
alternate for long:

- A stage peer that waits for partners and carries the whole model becomes a full replica.
- A full replica becomes a stage peer if that completes a pipeline of peers that wait, and the chain is not
  slower than the replica alone. Others must go on training meanwhile.

Pure functions: the same peers in another order give the same roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from coordinator.base.phrases import short, stages_of
from coordinator.placement.cost_model import Costs, memory_budget, memory_needed, present_capacity, survey_of
from coordinator.placement.replan import next_plan
from coordinator.placement.reservations import Vacancies, Vacancy
from coordinator.placement.rules import filled_replicas, member_obstacle, member_of
from coordinator.placement.start import initial_plan, lacking
from coordinator.run.state.events import AssignmentReserved, RoleChanged
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.group.payload_bits import bits_per_parameter
from protocol.math.flops import microbatch_flops
from protocol.roles import POLICIES
from protocol.spec.fixed import SETTLE_ROUNDS
from protocol.spec.run import RunSpec
from protocol.types import (
    Capacity,
    Estimates,
    PeerId,
    Plan,
    Reachability,
    ReservedAssignment,
    Role,
    StageRange,
)

_SLOWER, _SLOWER_WITH_SHARES = 2.0, 4.0
"""Times the others' round that a full replica may need: more where slow ones take fewer microbatches."""
_LEAST_UPLOAD_SECONDS = 5.0
"""A payload may take this long however short a round is: as long as a group waits at least."""
_PATIENCE = 2
"""Times SETTLE_ROUNDS: stage moves and spares have their turn first."""
_MOST_DOUBLINGS = 5


@dataclass(frozen=True)
class RoleChoice:
    """A role, and why a peer has it: a sentence for people, never empty."""

    role: Role
    reason: str


def obstacle(spec: RunSpec, able: Capacity, round_seconds: float = 0.0) -> str:
    """Why a peer cannot carry the whole model, as a sentence; "" if it can.

    `round_seconds` is what other replicas need for an inner phase; 0 if nothing is known of it.
    """
    whole = StageRange(0, spec.swarm.stages)
    needed = memory_needed(spec, whole, 1, able.device, able.main_bytes)
    budget = memory_budget(spec, able)
    if not able.memory_bytes:
        return "its memory is not known"
    if needed > budget:
        return f"the whole model takes {_size(needed)} of memory, and this peer can give {_size(budget)}"
    usual = spec.timing.fetch
    if round_seconds:
        usual = min(usual, max(round_seconds, _LEAST_UPLOAD_SECONDS))
    # A dense round may take longer than others, but not longer than all payloads may.
    for nbytes, longest in ((payload_bytes(spec), usual), (_longest_payload_bytes(spec), spec.timing.fetch)):
        upload = nbytes / able.uplink if able.uplink else 0.0
        if upload > longest:
            return (
                f"its line sends a payload of the whole model in {upload:.3g} s, "
                f"and {longest:.3g} s are allowed"
            )
    seconds = _phase_seconds(spec, able)
    slower = _SLOWER_WITH_SHARES if spec.grouping.balance else _SLOWER
    if round_seconds and seconds > slower * round_seconds:
        return f"alone it computes a round in {seconds:.3g} s, and the others need {round_seconds:.3g} s"
    return ""


def roles_at_start(
    peers: Iterable[Peer], spec: RunSpec, estimates: Mapping[PeerId, Estimates]
) -> dict[PeerId, RoleChoice]:
    """The role of each flexible peer of a run that has not started: they fill what the others leave missing.

    The fastest of those that carry the whole model become full replicas. If such a plan lacks a peer that
    others reach, peers that only dial become full replicas before others.
    """
    staying = sorted((peer for peer in peers if peer.is_staying), key=lambda peer: peer.arrival)
    flexible = [peer for peer in staying if peer.is_flexible]
    bound = Counter(peer.role for peer in staying if not peer.is_flexible)
    wanted = max(0, POLICIES[Role.REPLICA].peers_needed(spec) - bound[Role.REPLICA])
    able = {peer.peer: present_capacity(peer, estimates.get(peer.peer)) for peer in flexible}
    obstacles = {peer: obstacle(spec, each) for peer, each in able.items()}
    ranked = [peer for peer in flexible if not obstacles[peer.peer]]
    ranked.sort(key=lambda peer: (-able[peer.peer].flops, -able[peer.peer].memory_bytes, peer.arrival))
    found = _with_alone(flexible, ranked[:wanted], spec, able, obstacles)
    if len(ranked) <= wanted or lacking(_as(staying, found), spec):
        return found
    if isinstance(initial_plan(_as(staying, found), spec, estimates), Plan):
        return found
    dialing_first = sorted(ranked, key=lambda peer: peer.reachability is not Reachability.DIAL_ONLY)
    other = _with_alone(flexible, dialing_first[:wanted], spec, able, obstacles)
    return other if isinstance(initial_plan(_as(staying, other), spec, estimates), Plan) else found


def _with_alone(
    flexible: Sequence[Peer],
    alone: Sequence[Peer],
    spec: RunSpec,
    able: Mapping[PeerId, Capacity],
    obstacles: Mapping[PeerId, str],
) -> dict[PeerId, RoleChoice]:
    """The peers of `alone` as full replicas, the others of `flexible` as stage peers."""
    chosen = {peer.peer for peer in alone}
    return {
        each.peer: RoleChoice(Role.REPLICA, _carries(spec, able[each.peer]))
        if each.peer in chosen
        else RoleChoice(
            Role.STAGE, obstacles[each.peer] or "the run has the full replicas that it starts with"
        )
        for each in flexible
    }


def _as(peers: Sequence[Peer], choices: Mapping[PeerId, RoleChoice]) -> list[Peer]:
    """`peers` in the chosen roles."""
    return [replace(peer, role=choices[peer.peer].role) if peer.peer in choices else peer for peer in peers]


def role_of_newcomer(
    state: State, peer: Peer, former: Peer | None, reservation: ReservedAssignment | None
) -> RoleChoice:
    """The role of a flexible `peer` that joins a run that has started.

    Args:
        former: what the peer was when it was here before.
        reservation: the one that was kept for it; with it, its former role is kept if it still carries it.
    """
    why_not = whole_model_obstacle(state, peer)
    has_place = former is not None and former.is_flexible and reservation is not None
    if former is not None and has_place and (former.policy.joins_pipelines or not why_not):
        return RoleChoice(former.role, former.role_reason)
    if state.stages == 1:
        return RoleChoice(Role.REPLICA, "the model is one stage")
    if why_not:
        return RoleChoice(Role.STAGE, why_not)
    vacancies = Vacancies(state)
    lacking = Counter(each.replica for each in vacancies.vacant)
    for each in vacancies.vacant:
        is_pipeline = len(state.layout(each.replica)) > 1
        if is_pipeline and lacking[each.replica] == 1 and vacancies.suits(each, peer):
            return RoleChoice(
                Role.STAGE, f"replica-{each.replica} lacks only a peer for stages {each.stages}"
            )
    return RoleChoice(
        Role.REPLICA, _carries(state.spec, present_capacity(peer, state.estimates.get(peer.peer)))
    )


def whole_model_obstacle(state: State, peer: Peer) -> str:
    """:func:`obstacle` for a peer of a run that trains."""
    return obstacle(state.spec, present_capacity(peer, state.estimates.get(peer.peer)), _round_seconds(state))


def payload_bytes(spec: RunSpec) -> float:
    """About the bytes of one replica's payloads in a round, mean over the rounds."""
    return _longest_payload_bytes(spec) / spec.outer.turns


def _longest_payload_bytes(spec: RunSpec) -> float:
    """About the bytes of one replica's payloads of all stages, as in the last round."""
    parameters = spec.parameters
    return parameters * bits_per_parameter(spec.outer) / 8


def _phase_seconds(spec: RunSpec, able: Capacity) -> float:
    """Seconds of an inner phase on the whole model; 0 if the speed is not known."""
    steps = spec.inner.steps * spec.inner.microbatches
    return steps * microbatch_flops(spec, range(spec.swarm.stages)) / able.flops if able.flops else 0.0


def _round_seconds(state: State) -> float:
    """Seconds of an inner phase of the usual replica: measured, else by the cost model, else 0."""
    measured = [median_low(each) for each in state.phase_seconds.values() if each]
    if measured or not state.plans:
        return median_low(measured) if measured else 0.0
    costs = Costs(state.spec, survey_of(state))
    steps = state.spec.inner.steps * state.spec.inner.microbatches
    predicted = [
        steps * costs.seconds_per_microbatch(each.members, [link.k for link in each.links])
        for each in state.plans[-1].replicas
    ]
    return median_low([each for each in predicted if each] or [0.0])


def _carries(spec: RunSpec, able: Capacity) -> str:
    needed = memory_needed(spec, StageRange(0, spec.swarm.stages), 1, able.device, able.main_bytes)
    parts = [f"it carries the whole model, which takes {_size(needed)} of its {_size(able.memory_bytes)}"]
    if able.uplink:
        parts.append(f"its line sends a payload in {max(0.01, payload_bytes(spec) / able.uplink):.2g} s")
    if able.flops:
        parts.append(f"it computes a round in {_phase_seconds(spec, able):.3g} s")
    return "; ".join(parts)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def change_roles(transaction: Transaction, from_round: int) -> None:
    """Give at most one flexible peer another role and a reservation; called before the plan of `from_round`.

    No effect shortly before the end of the run: the peer would not train again.
    """
    state = transaction.state
    flexible = [peer for peer in state.staying if peer.is_flexible and _has_waited_long(state, peer)]
    is_late = from_round + SETTLE_ROUNDS > state.spec.rounds
    if not flexible or is_late or state.stages == 1:
        return
    changes = _to_full_replica(transaction, flexible) or _to_stage_peer(transaction, flexible, from_round)
    for event in changes:
        transaction.add(event)


def _has_waited_long(state: State, peer: Peer) -> bool:
    patience = _PATIENCE * SETTLE_ROUNDS << min(peer.role_changes, _MOST_DOUBLINGS)
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
                AssignmentReserved(transaction.now, replace(hole, peer=peer.peer)),
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
            and _has_waited_long(state, state.peers[each.peer])
            and member_obstacle(state, each, from_round) is None
            for each in partners
        ):
            yield hole, sorted(partners, key=lambda each: each.position)


def _is_worth_it(state: State, peer: Peer, hole: Vacancy, partners: Sequence[ReservedAssignment]) -> bool:
    """Whether the chain with `peer` is not slower than `peer` alone, as far as that is known."""
    costs = Costs(state.spec, survey_of(state))
    chain = sorted([*partners, replace(hole, peer=peer.peer)], key=lambda each: each.position)
    members = [member_of(state.peers[each.peer], each.stages) for each in chain]
    # As in the first plan: k widens later, as far as the links carry it.
    ks = [state.spec.link.possible_ks[0]] * (len(members) - 1)
    together = costs.seconds_per_microbatch(members, ks)
    return together <= costs.compute(peer.peer, StageRange(0, state.stages)) or not together


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
