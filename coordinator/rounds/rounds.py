"""The rules of one round: offers, the matched group, reports, and the one decision.

A (stage, round) goes through offers -> group -> reports -> decision. A round opens when the one before it is
decided at every stage: no honest replica can be ahead of that, since its inner phase needs all stages.
Refusals are raised as HetnodeError. Events that were added before a refusal are kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from coordinator.membership.strikes import judge, note_rejections, strike
from coordinator.membership.validation import bad_request, check_descriptor, host_of, live_peer
from coordinator.placement.replan import next_plan
from coordinator.placement.stage_moves import complete_a_pipeline, move_spares
from coordinator.rounds.attestation import note_divergence, settled_digest
from coordinator.rounds.deadlines import closes_at, decide_seconds, gather_seconds
from coordinator.state.commands import Await, Offer, Report
from coordinator.state.events import (
    GroupClosed,
    HoldingsReported,
    PayloadOffered,
    PayloadWithheld,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
)
from coordinator.state.state import Round, State
from coordinator.state.text import listed
from coordinator.state.transaction import Transaction
from protocol.algorithm.sampling import next_first_sample
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import (
    Decision,
    ExchangeGroup,
    ManifestEntry,
    Part,
    PayloadDescriptor,
    PeerId,
    Plan,
)

MAX_HOLDERS = 16
"""Most holders that a manifest names per payload: naming all would grow with the square of the swarm."""


def offer(transaction: Transaction, spec: RunSpec, command: Offer, now: float) -> None:
    """Record an offered payload, and close the group if it is complete.

    A repeated offer, or an offer after the group was closed, changes nothing: the caller gets the group as it
    is. An offer that no honest peer makes costs a strike.

    Raises:
        HetnodeError: UNKNOWN_PEER; BAD_REQUEST; ANCHOR_DIVERGED, which is also recorded; SEAT_LOST if the
            peer came back, retreated or diverged since the plan was made.
    """
    sender, descriptor = command.peer, command.descriptor
    stage, round_number = descriptor.stage, descriptor.round_number
    live_peer(transaction.state, sender)
    if descriptor.owner != sender:
        raise bad_request(f"{sender} offers a payload of {descriptor.owner}")
    if (stage, round_number) in transaction.state.decisions:
        return
    host_of(transaction.state, spec, sender, stage, round_number)
    round_state = transaction.state.round_of(stage, round_number)
    if round_state.group is not None or round_state.offers.get(sender) == descriptor:
        return
    try:
        check_descriptor(transaction.state, spec, descriptor)
        if sender in round_state.offers:
            raise bad_request(f"{sender} has already offered another payload for this round")
    except HetnodeError as refusal:
        strike(transaction, sender, round_number, refusal.cause, now)
        raise
    agrees = settled_digest(transaction.state, stage, round_number - 1, Part.STAGE) in (
        None,
        descriptor.anchor_digest,
    )
    if agrees and not transaction.state.takes_part(sender, round_number):
        raise HetnodeError(
            ErrorCode.SEAT_LOST,
            f"{sender} no longer takes part in round {round_number}: it came back, retreated, or diverged.",
            "It must follow the rounds until a new plan assigns it.",
        )
    expected = _admit(transaction, descriptor, now)
    if expected is not None:
        raise HetnodeError(
            ErrorCode.ANCHOR_DIVERGED,
            f"The anchor of {sender} at stage {stage} before round {round_number} is "
            f"{descriptor.anchor_digest}, that of the others is {expected}.",
            "Its replica must load the anchor of the others before it can contribute again.",
        )
    advance(transaction, spec, stage, now)


def withhold(transaction: Transaction, spec: RunSpec, command: Await, now: float) -> None:
    """Record that the sender waits for a decision and offers nothing itself.

    It names the plan under which it hosts the stage. If that is the plan of the round, the group no longer
    waits for its offer. A sender that names no plan only asks: it may not know its new assignment yet.

    Raises:
        HetnodeError: UNKNOWN_PEER; BAD_REQUEST for a stage or round that will never be decided.
    """
    sender, stage, round_number = command.peer, command.stage, command.round_number
    epoch = command.withheld
    live_peer(transaction.state, sender)
    if not (0 <= stage < spec.swarm.stages and 1 <= round_number <= spec.rounds):
        raise bad_request(f"there is no stage {stage} in round {round_number}")
    assignment = (
        transaction.state.assignment(sender, round_number)
        if transaction.state.takes_part(sender, round_number)
        else None
    )
    round_state = transaction.state.round_of(stage, round_number)
    is_open = (
        round_number == transaction.state.current_round
        and (stage, round_number) not in transaction.state.decisions
    )
    if epoch == 0 or not is_open or epoch != transaction.state.plan_for(round_number).epoch:
        return
    if round_state.group is not None or assignment is None or stage not in assignment.member.stages:
        return
    if sender not in round_state.offers and sender not in round_state.withheld:
        transaction.add(PayloadWithheld(now, stage, round_number, sender))
        advance(transaction, spec, stage, now)


def report(transaction: Transaction, spec: RunSpec, command: Report, now: float) -> None:
    """Record which payloads the sender holds or rejects, and decide the round if no other report is missing.

    Before the group is closed, a reported payload that its owner has not offered yet counts as its offer: the
    peers may have formed a group through the DHT while the coordinator was away. A payload is left out if it
    starts from a diverged anchor, is too late for the group, or differs from the one that its owner offered.
    In the last case the owner has signed two payloads and gets a strike. After the decision nothing changes.

    Raises:
        HetnodeError: as :func:`offer`.
    """
    sender, stage, round_number, held = command.peer, command.stage, command.round_number, command.held
    live_peer(transaction.state, sender)
    if (stage, round_number) in transaction.state.decisions:
        return
    host_of(transaction.state, spec, sender, stage, round_number)
    round_state = transaction.state.round_of(stage, round_number)
    if len({descriptor.owner for descriptor in held}) != len(held):
        raise bad_request(f"{sender} reports two payloads of one owner")
    unseen = []
    for descriptor in held:
        offered = round_state.offers.get(descriptor.owner)
        if offered == descriptor:
            continue
        if (descriptor.stage, descriptor.round_number) != (stage, round_number):
            raise bad_request(f"{sender} reports a payload of another stage or round")
        host_of(transaction.state, spec, descriptor.owner, stage, round_number)
        check_descriptor(transaction.state, spec, descriptor)
        unseen.append(descriptor)
    for descriptor in unseen:
        if descriptor.owner in round_state.offers:
            strike(transaction, descriptor.owner, round_number, "it signed two payloads for one round", now)
        elif round_state.group is None:
            _admit(transaction, descriptor, now)
    note_rejections(transaction, sender, stage, round_number, command.rejected, now)
    offers = transaction.state.round_of(stage, round_number).offers
    before = round_state.reports.get(sender)
    owners = (before or frozenset()) | {d.owner for d in held if offers.get(d.owner) == d}
    if owners != before:
        transaction.add(HoldingsReported(now, stage, round_number, sender, tuple(sorted(owners))))
    advance(transaction, spec, stage, now)


def advance(transaction: Transaction, spec: RunSpec, stage: int, now: float) -> None:
    """Close the group and decide the current round of `stage`, each as soon as it is due at `now`."""
    state = transaction.state
    round_number = state.current_round
    if (
        not 1 <= round_number <= spec.rounds
        or (stage, round_number) in state.decisions
        or is_stalled(state, spec)
    ):
        return
    if state.round_of(stage, round_number).group is None:
        if not _group_is_due(state, spec, stage, round_number, now):
            why = _reason_without_offers(state, spec, stage, round_number, now)
            if why is not None:
                _conclude(transaction, spec, stage, (), why, now)
            return
        _close_group(transaction, spec, stage, round_number, now)
    round_state = transaction.state.round_of(stage, round_number)
    assert round_state.group is not None
    late = now - max(round_state.closed_at, transaction.state.started_at) >= decide_seconds(
        spec, round_state.group
    )
    if late or not missing_reports(transaction.state, round_state):
        _decide(transaction, spec, stage, round_state, round_state.group, now)


def is_stalled(state: State, spec: RunSpec) -> bool:
    """Whether the run waits for peers: no replica of the round is complete, and no payload is offered.

    A stalled round is neither closed nor aborted, however long the stall lasts.
    """
    round_number = state.current_round
    is_idle = state.phase is RunPhase.TRAINING and round_number <= spec.rounds and state.opened_at is None
    return is_idle and not state.complete_replicas(round_number)


def resume(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """End a stall once a replica is complete again: the round starts anew, with the same samples."""
    state = transaction.state
    if not is_stalled(state, spec):
        return
    round_number, newest = state.current_round, state.plans[-1]
    # Without this pause, members that cannot reach each other would join and retreat in a busy loop.
    if newest.from_round == round_number and now < state.began_at + spec.timing.heartbeat:
        return
    first_sample = next_first_sample(newest, spec, round_number)
    successor = next_plan(state, spec, newest.epoch + 1, round_number, first_sample)
    if isinstance(successor, Plan):
        reason = f"round {round_number} starts anew, nothing was committed of its samples: {successor.reason}"
        transaction.add(PlanAdopted(now, replace(successor, reason=reason)))
    else:
        complete_a_pipeline(transaction, spec, now)


def missing_offers(state: State, stage: int, round_number: int) -> list[str]:
    """Names of the complete replicas that have not offered yet and still may."""
    round_state = state.round_of(stage, round_number)
    hosts = ((replica, replica.host_of(stage).peer) for replica in state.complete_replicas(round_number))
    return [
        r.name for r, host in hosts if host not in round_state.offers and host not in round_state.withheld
    ]


def missing_reports(state: State, round_state: Round) -> list[PeerId]:
    """The members of the group that have not reported yet and still can."""
    members = round_state.group.descriptors if round_state.group else ()
    return [
        d.owner
        for d in members
        if d.owner not in round_state.reports
        and state.takes_part(d.owner, d.round_number)
        and state.peers[d.owner].is_live
    ]


def _group_is_due(state: State, spec: RunSpec, stage: int, round_number: int, now: float) -> bool:
    round_state = state.round_of(stage, round_number)
    if not round_state.offers:
        return False
    closes = closes_at(state, spec)
    if closes is not None and now >= closes:
        return True
    # A cheap check first: this runs once per offer.
    plan = state.plan_for(round_number)
    answers = len(round_state.offers) + len(round_state.withheld) + len(state.absent.get(plan.epoch, ()))
    enough = answers >= len(plan.replicas)
    return enough and not missing_offers(state, stage, round_number)


def _reason_without_offers(
    state: State, spec: RunSpec, stage: int, round_number: int, now: float
) -> str | None:
    """Why this stage is decided although it has no offer; None while it must wait.

    Before the first offer at any stage it waits for ever: an inner phase may take any time.
    """
    round_state = state.round_of(stage, round_number)
    if round_state.offers:
        return None
    if round_state.withheld and not missing_offers(state, stage, round_number):
        return "no replica had a payload to offer"
    closes = closes_at(state, spec)
    if closes is not None and now >= closes:
        return "no peer offered a payload before the round closed"
    return None


def _decide(
    transaction: Transaction, spec: RunSpec, stage: int, round_state: Round, group: ExchangeGroup, now: float
) -> None:
    """Commit the payloads with enough holders, or abort where there is none."""
    state = transaction.state
    need = max(1, min(2, len(state.complete_replicas(state.current_round))))
    live_reports = [
        (peer, owners) for peer, owners in sorted(round_state.reports.items()) if state.peers[peer].is_live
    ]
    entries, left_out = [], []
    for position, descriptor in enumerate(group.descriptors):
        holders = [peer for peer, owners in live_reports if descriptor.owner in owners]
        # More than half of the reporters must hold it: two peers alone could claim bytes that they lack.
        if len(holders) < need or 2 * len(holders) <= len(live_reports):
            assignment = state.assignment(descriptor.owner, descriptor.round_number)
            left_out.append(assignment.replica.name if assignment else descriptor.owner)
            continue
        start = position % len(holders)  # spreads the downloads over all holders
        holders = [*holders[start:], *holders[:start]][:MAX_HOLDERS]
        entries.append(ManifestEntry(descriptor, tuple(sorted(holders))))
    peers = f"{need} peer{'s' if need > 1 else ''}"
    if not entries:
        reason = (
            f"none of {len(group.descriptors)} payloads is held by {peers} and by more than half of the group"
        )
    elif left_out:
        reason = f"without the payloads of {listed(left_out)}, which too few of the group hold"
    else:
        reason = f"all {len(entries)} payloads are held by at least {peers}"
    judge(transaction, state.current_round, round_state, now)
    _conclude(transaction, spec, stage, tuple(entries), reason, now)


def _conclude(
    transaction: Transaction,
    spec: RunSpec,
    stage: int,
    entries: tuple[ManifestEntry, ...],
    reason: str,
    now: float,
) -> None:
    round_number = transaction.state.current_round
    next_epoch = _next_epoch(transaction, spec, round_number, now)
    decision = Decision(stage, round_number, bool(entries), entries, next_epoch, reason)
    transaction.add(RoundCommitted(now, decision) if entries else RoundAborted(now, decision))


def _next_epoch(transaction: Transaction, spec: RunSpec, round_number: int, now: float) -> int:
    """The epoch of the next round. The first decision of a round fixes it for all stages."""
    state = transaction.state
    plan = state.plan_for(round_number + 1)
    is_first = all((stage, round_number) not in state.decisions for stage in range(state.stages))
    if not is_first or round_number == spec.rounds:
        return plan.epoch
    first_sample = next_first_sample(plan, spec, round_number + 1)
    successor = next_plan(state, spec, plan.epoch + 1, round_number + 1, first_sample)
    if isinstance(successor, Plan):
        transaction.add(PlanAdopted(now, successor))
    move_spares(transaction, spec, now)
    return successor.epoch if isinstance(successor, Plan) else plan.epoch


def _admit(transaction: Transaction, descriptor: PayloadDescriptor, now: float) -> str | None:
    """Record the offer if it starts from the anchor of the others. Otherwise return their digest.

    While no digest is settled, every offer counts; the group is closed over the anchor of the majority.
    """
    stage, round_number, found = descriptor.stage, descriptor.round_number, descriptor.anchor_digest
    expected = settled_digest(transaction.state, stage, round_number - 1, Part.STAGE) or found
    if found != expected:
        note_divergence(
            transaction, now, stage, round_number - 1, Part.STAGE, descriptor.owner, found, expected
        )
        return expected
    transaction.add(PayloadOffered(now, descriptor))
    return None


def _common_anchor(state: State, stage: int, round_number: int) -> str | None:
    """The digest from which `round_number` starts: the settled one, else that of most offers."""
    attested = settled_digest(state, stage, round_number - 1, Part.STAGE)
    offered = [descriptor.anchor_digest for descriptor in state.round_of(stage, round_number).offers.values()]
    return attested or (Counter(offered).most_common(1)[0][0] if offered else None)


def _close_group(transaction: Transaction, spec: RunSpec, stage: int, round_number: int, now: float) -> None:
    """Close the group over the common anchor. Offers from another anchor are recorded as diverged."""
    anchor = _common_anchor(transaction.state, stage, round_number)
    assert anchor is not None
    for descriptor in transaction.state.round_of(stage, round_number).offers.values():
        found = descriptor.anchor_digest
        if found != anchor:
            note_divergence(
                transaction, now, stage, round_number - 1, Part.STAGE, descriptor.owner, found, anchor
            )
    offers = transaction.state.round_of(stage, round_number).offers.values()
    nbytes = sum(descriptor.nbytes for descriptor in offers if descriptor.anchor_digest == anchor)
    seconds = gather_seconds(transaction.state, spec, stage, nbytes)
    transaction.add(
        GroupClosed(now, stage, round_number, f"{spec.run_id}/{stage}/{round_number}", anchor, seconds)
    )
