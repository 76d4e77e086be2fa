"""The rules of one round: offers, the matched group, reports, and the one decision.

A (stage, round) goes through offers -> group -> reports -> decision. A round opens when the one before it is
decided at every stage: no honest replica can be ahead of that, since its inner phase needs all stages.
Refusals are raised as HetnodeError; what was drafted before a refusal stands.
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
"""Holders named per payload of a manifest; more would make manifests grow with the square of the swarm."""


def offer(transaction: Transaction, spec: RunSpec, command: Offer, now: float) -> None:
    """Take the payload that `sender` offers for its stage and round, and close the group if it is complete.

    The same offer again, or an offer after the group has closed, changes nothing: the caller is shown the
    group as it stands. An offer that no honest peer makes costs a strike.

    Raises:
        HetnodeError: UNKNOWN_PEER; BAD_REQUEST; ANCHOR_DIVERGED, which is also recorded, or if the peer has
            not kept its seat: it came back, retreated, or another anchor of it differed.
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
            f"{sender} has no part in round {round_number} any more: it came back, retreated, or diverged.",
            "It must follow the rounds until a new plan seats it.",
        )
    expected = _admit(transaction, descriptor, now)
    if expected is not None:
        raise HetnodeError(
            ErrorCode.ANCHOR_DIVERGED,
            f"The anchor of {sender} at stage {stage} before round {round_number} is {descriptor.anchor_digest}, "
            f"that of the others is {expected}.",
            "Its replica must load the anchor of the others before it can contribute again.",
        )
    advance(transaction, spec, stage, now)


def withhold(transaction: Transaction, spec: RunSpec, command: Await, now: float) -> None:
    """Note that `sender` asks for a decision to which it has not contributed.

    If it hosts the stage under plan `epoch`, and that is the one in force, it says that it will not offer, so
    nobody waits for it. Anybody may ask, under no plan: who has not heard yet of its new seat is waited for.

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
    """Note which payloads `sender` holds or refuses, and decide the round if that was the last word needed.

    Before the group is closed, a reported payload that its owner has not offered yet counts as its offer: the
    peers may have matched through the DHT while the coordinator was away. One that starts from a diverged
    anchor, came too late for the group, or is not the one that its owner offered is left out; for the last
    its owner gets a strike, since it has signed two. After the decision nothing changes.

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
            why = _nothing_comes(state, spec, stage, round_number, now)
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
    """Whether the run waits for peers: no replica of the current round is whole, and nobody has offered.

    However long that lasts, the round is neither closed nor aborted.
    """
    round_number = state.current_round
    is_idle = state.phase is RunPhase.TRAINING and round_number <= spec.rounds and state.opened_at is None
    return is_idle and not state.complete_replicas(round_number)


def resume(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """End a stall as soon as some replica is whole again: the round starts anew, with the same samples."""
    state = transaction.state
    if not is_stalled(state, spec):
        return
    round_number, newest = state.current_round, state.plans[-1]
    # Members that cannot reach each other would come and go without a pause.
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
    """The members of the group that have not reported yet and still can: who came back has lost its part."""
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
    # A cheap bound first: this runs once per offer.
    plan = state.plan_for(round_number)
    answers = len(round_state.offers) + len(round_state.withheld) + len(state.absent.get(plan.epoch, ()))
    enough = answers >= len(plan.replicas)
    return enough and not missing_offers(state, stage, round_number)


def _nothing_comes(state: State, spec: RunSpec, stage: int, round_number: int, now: float) -> str | None:
    """Why this stage must not hold up the others any longer although nobody has offered; None while it may.

    Before the first offer at any stage it may for ever: an inner phase takes as long as it takes.
    """
    round_state = state.round_of(stage, round_number)
    if round_state.offers:
        return None
    if round_state.withheld and not missing_offers(state, stage, round_number):
        return "no replica had a payload to offer"
    closes = closes_at(state, spec)
    if closes is not None and now >= closes:
        return "nobody offered a payload before the round closed"
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
        # More than half of those who have tried: or two could have the others wait for bytes that none has.
        if len(holders) < need or 2 * len(holders) <= len(live_reports):
            assignment = state.assignment(descriptor.owner, descriptor.round_number)
            left_out.append(assignment.replica.name if assignment else descriptor.owner)
            continue
        start = position % len(holders)  # so that not everybody asks the same few
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
    """Record the offer if it starts from the anchor of the others; otherwise return theirs.

    While it is not settled which that is, every offer is taken: the group is closed over the one of most.
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
    """The digest from which `round_number` starts: as attested, else as most offers have it."""
    attested = settled_digest(state, stage, round_number - 1, Part.STAGE)
    offered = [descriptor.anchor_digest for descriptor in state.round_of(stage, round_number).offers.values()]
    return attested or (Counter(offered).most_common(1)[0][0] if offered else None)


def _close_group(transaction: Transaction, spec: RunSpec, stage: int, round_number: int, now: float) -> None:
    """Close the group over the common anchor: attestations may have shown since that an offer has another."""
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
