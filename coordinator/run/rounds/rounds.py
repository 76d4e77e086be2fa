"""The rules of one round: offers, the matched group, reports, and the decision.

A (stage, round) goes through offers -> group -> reports -> decision. A round opens when the round before it
is decided at every stage: no honest replica can be ahead, because its inner phase needs all stages.
Refusals are raised as HetnodeError. Events that a rule added before its refusal count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

from coordinator.base.phrases import counted, listed
from coordinator.membership.silence import part_barren, remove_silent
from coordinator.membership.strikes import contradict, judge, note_rejections, strike
from coordinator.membership.validation import bad_request, check_descriptor, check_host, check_run, live_peer
from coordinator.placement.phases import check_not_early, earliest
from coordinator.placement.repair import awaits_repair, has_survivor
from coordinator.placement.replan import next_plan
from coordinator.placement.reservations import complete_a_pipeline, move_spares, reserve_assignments
from coordinator.placement.roles import change_roles
from coordinator.run.rounds.answers import all_have_answered, all_have_reported, lacks_weight, record_holdings
from coordinator.run.rounds.arbitration import (
    awaits_arbiter,
    counts,
    holdings_of,
    is_held_by_arbiter,
    note_verdict,
)
from coordinator.run.rounds.attestation import note_divergence, settled_digest
from coordinator.run.rounds.deadlines import closes_at, decide_seconds, gather_seconds
from coordinator.run.rounds.skipping import check_due, skip_others
from coordinator.run.state import events
from coordinator.run.state.commands import Arbitrate, Await, Offer, Report
from coordinator.run.state.lines import uplink_of, with_most_uplink
from coordinator.run.state.records import Round
from coordinator.run.state.settlement import SettledResult, settlement_of
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.turns import is_due
from protocol.status import RunPhase
from protocol.types import (
    Aborted,
    Committed,
    CommittedResult,
    ExchangeGroup,
    ManifestEntry,
    Part,
    PayloadDescriptor,
    PeerId,
    Plan,
)

MAX_HOLDERS = 16
"""Most holders per payload in a manifest. With all of them it would grow with the square of the swarm."""
MOST_RESTART_SECONDS = 60.0


def offer(transaction: Transaction, command: Offer) -> None:
    """Record an offered payload, and close the group if it is complete.

    A repeated offer, or an offer after the group was closed, changes nothing: the caller gets the existing
    group. An offer that no honest peer makes costs a strike.

    Raises:
        HetnodeError: UNKNOWN_PEER; BAD_REQUEST; ANCHOR_DIVERGED, which is also recorded; SEAT_LOST if the
            peer joined again or diverged since the plan was made; OFFER_TOO_EARLY if its replica cannot have
            trained so much since the round began.
    """
    sender, descriptor = command.peer, command.descriptor
    stage, round_number = descriptor.stage, descriptor.round_number
    live_peer(transaction.state, sender)
    if descriptor.owner != sender:
        raise bad_request(f"{sender} offers a payload of {descriptor.owner}")
    check_due(transaction.state, stage, round_number)
    if transaction.state.is_decided(stage, round_number):
        return
    check_host(transaction.state, sender, stage, round_number)
    round_state = transaction.state.round_of(stage, round_number)
    if round_state.group is not None or round_state.offers.get(sender) == descriptor:
        return
    former = round_state.offers.get(sender)
    check_run(transaction.state, descriptor)
    try:
        check_descriptor(transaction.state, descriptor)
        if former is not None and contradict(former, descriptor):
            raise bad_request(f"{sender} has already offered another payload for this round")
    except HetnodeError as refusal:
        # The call came with the sender's certificate, so no other peer can have made this offer.
        strike(transaction, sender, round_number, refusal.cause)
        raise
    settled = settled_digest(transaction.state, stage, round_number - 1, Part.STAGE)
    agrees = settled in (None, descriptor.anchor_digest)
    # A peer with another anchor gets ANCHOR_DIVERGED below instead, because it must load the right one.
    if agrees and (former is not None or not transaction.state.may_offer(sender, round_number)):
        raise HetnodeError(
            ErrorCode.SEAT_LOST,
            f"{sender} no longer takes part in round {round_number}: it joined again, diverged, or has "
            "offered a payload from another anchor or plan.",
            "It must follow the rounds until a new plan assigns it.",
        )
    if agrees:
        check_not_early(transaction.state, descriptor, transaction.now)
    expected = _admit(transaction, descriptor)
    if expected is not None:
        raise HetnodeError(
            ErrorCode.ANCHOR_DIVERGED,
            f"The anchor of {sender} at stage {stage} before round {round_number} is "
            f"{descriptor.anchor_digest}, that of the others is {expected}.",
            "Its replica must load the anchor of the others before it can contribute again.",
        )
    advance(transaction, stage, in_time=True)


def withhold(transaction: Transaction, command: Await) -> None:
    """Record that the sender waits for a decision and offers no payload.

    The sender names the plan under which it hosts the stage. If that is the plan of the round, the group no
    longer waits for its offer. Without a plan it only asks: it may not know its new assignment yet.

    Raises:
        HetnodeError: UNKNOWN_PEER; BAD_REQUEST for a stage or round that will never be decided.
    """
    state, sender, stage, round_number = transaction.state, command.peer, command.stage, command.round_number
    live_peer(state, sender)
    if not (0 <= stage < state.stages and 1 <= round_number <= state.spec.rounds):
        raise bad_request(f"there is no stage {stage} in round {round_number}")
    round_state = state.round_of(stage, round_number)
    is_open = round_number == state.current_round and not state.is_decided(stage, round_number)
    is_open &= is_due(state.spec, stage, round_number)
    if not is_open or round_state.group is not None or sender in {*round_state.offers, *round_state.withheld}:
        return
    assignment = state.assignment(sender, round_number)
    hosts_stage = assignment is not None and stage in assignment.member.stages
    is_current_plan = state.standing_epoch(sender, command.epoch) == state.plan_for(round_number).epoch
    if hosts_stage and is_current_plan and state.takes_part(sender, round_number):
        transaction.add(events.PayloadWithheld(transaction.now, stage, round_number, sender))
        advance(transaction, stage, in_time=True)


def report(transaction: Transaction, command: Report) -> None:
    """Record which payloads the sender holds or rejects, and decide the round if no other report is missing.

    Before the group is closed, a reported payload that its owner has not offered yet counts as its offer: the
    peers may have formed a group through the DHT while the coordinator was away. A payload is ignored if it
    starts from a diverged anchor, is too early for its owner, too late for the group, or differs from the
    offer of its owner. A report after the decision changes nothing.

    Raises:
        HetnodeError: as :func:`offer`.
    """
    sender, stage, round_number, held = command.peer, command.stage, command.round_number, command.held
    live_peer(transaction.state, sender)
    check_due(transaction.state, stage, round_number)
    if transaction.state.is_decided(stage, round_number):
        return
    check_host(transaction.state, sender, stage, round_number)
    state = transaction.state
    round_state = state.round_of(stage, round_number)
    if len({descriptor.owner for descriptor in held}) != len(held):
        raise bad_request(f"{sender} reports two payloads of one owner")
    # All checks come before all changes: a refused report must not leave half of its payloads behind.
    if fault := settlement_of(state.spec).fault_of(state, command):
        raise bad_request(fault)
    offers = round_state.offers
    # Most are the very records of the group: two records are only compared where they are not one.
    unseen = [d for d in held if (known := offers.get(d.owner)) is not d and known != d]
    for descriptor in unseen:
        if (descriptor.stage, descriptor.round_number) != (stage, round_number):
            raise bad_request(f"{sender} reports a payload of another stage or round")
        check_host(transaction.state, descriptor.owner, stage, round_number)
        check_descriptor(transaction.state, descriptor)
    for descriptor in unseen:
        offered = round_state.offers.get(descriptor.owner)
        if offered is not None and contradict(offered, descriptor):
            # Both descriptors carry the owner's signature, so the sender cannot have made one up.
            strike(transaction, descriptor.owner, round_number, "it signed two payloads for one round")
        elif (
            offered is None
            and round_state.group is None
            and not state.is_held
            and transaction.now >= earliest(transaction.state, descriptor)
        ):
            _admit(transaction, descriptor)
    if not state.is_unproven(sender):  # it has no say
        note_rejections(transaction, sender, stage, round_number, command.rejected)
        record_holdings(transaction, command)
    advance(transaction, stage)


def advance(transaction: Transaction, stage: int, in_time: bool = False) -> None:
    """Close the group and decide the current round of `stage`, if each of these is due at `now`.

    `in_time`: the deadline of the group is left to the next tick. All replicas set it, and there are as many
    offers as replicas.
    """
    state = transaction.state
    round_number = state.current_round
    is_open = 1 <= round_number <= state.spec.rounds and not state.is_decided(stage, round_number)
    if not is_open or not is_due(state.spec, stage, round_number) or state.is_held or is_stalled(state):
        return
    round_state = state.round_of(stage, round_number)
    if round_state.group is None:
        if awaits_repair(state, transaction.now):
            return
        is_complete = all_have_answered(state, stage, round_number) and not has_survivor(state, stage)
        # Before an offer at any stage there is no deadline: an inner phase may take any time.
        closes = None if is_complete or in_time else closes_at(state)
        if not is_complete and (closes is None or transaction.now < closes):
            return
        if not round_state.offers:
            # Other stages have payloads, and the next round needs a decision of every stage.
            late = "no peer offered a payload before the round closed"
            why = "no replica had a payload to offer" if is_complete else late
            conclude(transaction, stage, (), why)
            return
        _close_group(transaction, stage, round_number)
    round_state = transaction.state.round_of(stage, round_number)
    assert round_state.group is not None
    # After a restart the peers get the whole time again: they could not report in between.
    waits_since = max(round_state.closed_at, transaction.state.started_at)
    is_late = transaction.now - waits_since >= decide_seconds(state.spec, round_state.group)
    can_decide = is_late or all_have_reported(transaction.state, round_state)
    if not can_decide:
        return
    agreement = settlement_of(state.spec).agreement(transaction.state, round_state, round_state.group)
    if agreement is not None:
        _decide_result(transaction, stage, round_state.group, agreement)
    elif not awaits_arbiter(transaction, stage, round_state, round_state.group):
        _decide(transaction, stage, round_state, round_state.group)


def arbitrate(transaction: Transaction, command: Arbitrate) -> None:
    """Take the verdict of the arbiter about a contested payload, and decide the round if it was the last."""
    note_verdict(transaction, command)
    advance(transaction, command.stage)


def is_stalled(state: State) -> bool:
    """Whether the run waits for peers: no replica of the round is complete, and no payload is offered.

    A stalled round is neither closed nor aborted: without its only holder of a stage, a run would otherwise
    spend all its rounds as aborted ones.
    """
    round_number = state.current_round
    is_open = state.phase is RunPhase.TRAINING and round_number <= state.spec.rounds
    return is_open and state.opened_at is None and not state.has_complete_replica(round_number)


def resume(transaction: Transaction) -> None:
    """End a stall when a replica is complete again: the round starts anew, with the same samples."""
    state = transaction.state
    if not is_stalled(state):
        return
    round_number = state.current_round
    # Without this pause, members that cannot reach each other would get plans and retreat in a busy loop.
    if transaction.now < state.began_at + _restart_seconds(state):
        return
    if awaits_repair(state, transaction.now):
        return
    successor = next_plan(state, round_number)
    if isinstance(successor, Plan) and any(map(state.has_weight, successor.replicas)):
        reason = f"round {round_number} starts anew, nothing was committed of its samples: {successor.reason}"
        transaction.add(events.PlanAdopted(transaction.now, replace(successor, reason=reason)))
    else:
        reserve_assignments(transaction)
        complete_a_pipeline(transaction)


def _restart_seconds(state: State) -> float:
    """Time before the round starts anew: after some plans twice as long with each, since all are stored."""
    plans = sum(plan.from_round == state.current_round for plan in state.plans)
    doubled = min(max(0, plans - 4), 16)
    return min(MOST_RESTART_SECONDS, state.spec.timing.heartbeat * 2**doubled) if plans else 0.0


def _decide(transaction: Transaction, stage: int, round_state: Round, group: ExchangeGroup) -> None:
    """Commit the payloads with enough holders, or abort if there are none."""
    state = transaction.state
    holdings = holdings_of(state, round_state)
    entries, left_out, discounted = list[ManifestEntry](), list[str](), list[PeerId]()

    @cache  # most payloads have the same holders
    def fastest(holders: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        return with_most_uplink({peer: uplink_of(state, peer) for peer in holders})

    for position, descriptor in enumerate(group.descriptors):
        if state.is_weightless(descriptor.owner, descriptor.round_number):
            discounted.append(descriptor.owner)
            continue
        if not counts(round_state, holdings, descriptor.owner):
            assignment = state.assignment(descriptor.owner, descriptor.round_number)
            left_out.append(assignment.replica.name if assignment else descriptor.owner)
            continue
        holders = holdings.of(descriptor.owner)
        # Those that can send most, and not the same MAX_HOLDERS for every payload: spreads the downloads.
        holders = fastest(tuple(holders))
        start = position % max(1, len(holders))
        holders = [*holders[start:], *holders[:start]][:MAX_HOLDERS]
        if state.arbiter is not None and is_held_by_arbiter(round_state, descriptor.owner):
            holders = [*holders[: MAX_HOLDERS - 1], state.arbiter]
        entries.append(ManifestEntry(descriptor, tuple(sorted(holders))))
    peers = counted(holdings.least, "peer")
    if entries and (lacks := lacks_weight(state, stage, group, entries)):
        entries, reason = [], lacks
    elif not entries:
        reason = (
            f"none of {len(group.descriptors)} payloads is held by {peers} and by more than half of the group"
        )
    elif left_out:
        reason = f"without the payloads of {listed(left_out)}, which too few of the group hold"
    else:
        reason = f"all {len(entries)} payloads are held by at least {peers}"
    if discounted:
        reason += f"; without {counted(len(discounted), 'payload')} of peers with bad scores or none"
    judge(transaction, state.current_round, round_state)
    conclude(transaction, stage, tuple(entries), reason)


def _decide_result(transaction: Transaction, stage: int, group: ExchangeGroup, found: SettledResult) -> None:
    """Commit the result on which the group agrees, or abort."""
    lacks = lacks_weight(transaction.state, stage, group, found.entries) if found.entries else ""
    entries, result = ((), None) if lacks else (found.entries, found.result)
    conclude(transaction, stage, entries, lacks or found.reason, result)


def conclude(
    transaction: Transaction,
    stage: int,
    entries: tuple[ManifestEntry, ...],
    reason: str,
    result: CommittedResult | None = None,
) -> None:
    """Decide the current round of `stage`: committed if there are `entries`, else aborted.

    With the first decision of a round the stages without a turn are skipped.
    """
    round_number = transaction.state.current_round
    epoch = adopt_next_plan(transaction, round_number, is_lost=not entries)
    common = stage, round_number, epoch, reason
    decision = Committed(*common, entries, result) if entries else Aborted(*common)
    transaction.add(events.RoundDecided(transaction.now, decision))
    skip_others(transaction, round_number, epoch)


def adopt_next_plan(transaction: Transaction, round_number: int, is_lost: bool = False) -> int:
    """Adopt the plan of the next round with the first decision of this one, and return its epoch.

    So all members change plans at the same step without a vote. `is_lost`: that decision is an abort.
    """
    state = transaction.state
    plan = state.plan_for(round_number + 1)
    is_first = all((stage, round_number) not in state.decisions for stage in range(state.stages))
    if not is_first or round_number == state.spec.rounds:
        return plan.epoch
    part_barren(transaction)
    remove_silent(transaction)
    change_roles(transaction, round_number + 1)
    state = transaction.state
    successor = next_plan(state, round_number + 1, is_lost)
    if isinstance(successor, Plan):
        plan = successor
        transaction.add(events.PlanAdopted(transaction.now, plan))
    reserve_assignments(transaction)  # a reservation that has ended makes room for a spare
    move_spares(transaction)
    return plan.epoch


def _admit(transaction: Transaction, descriptor: PayloadDescriptor) -> str | None:
    """Record the offer if it starts from the anchor of the others. Otherwise return their digest.

    While no digest is settled, every offer is recorded: :func:`_close_group` takes the majority.
    """
    key = (descriptor.stage, descriptor.round_number - 1, Part.STAGE)
    expected = settled_digest(transaction.state, *key) or descriptor.anchor_digest
    if descriptor.anchor_digest != expected:
        note_divergence(transaction, key, descriptor.owner, descriptor.anchor_digest, expected)
        return expected
    transaction.add(events.PayloadOffered(transaction.now, descriptor))
    return None


def _close_group(transaction: Transaction, stage: int, round_number: int) -> None:
    """Close the group over the common anchor. Offers from another anchor are recorded as diverged."""
    state, key = transaction.state, (stage, round_number - 1, Part.STAGE)
    offers = state.round_of(stage, round_number).offers.values()
    voters = [each for each in offers if not state.is_unproven(each.owner)] or offers
    votes = Counter(descriptor.anchor_digest for descriptor in voters)
    anchor = settled_digest(state, *key) or votes.most_common(1)[0][0]
    nbytes = 0
    for descriptor in offers:
        if descriptor.anchor_digest == anchor:
            nbytes += descriptor.nbytes
        else:
            note_divergence(transaction, key, descriptor.owner, descriptor.anchor_digest, anchor)
    seconds = gather_seconds(transaction.state, stage, nbytes)
    group_id = f"{transaction.state.run}/{stage}/{round_number}"
    transaction.add(events.GroupClosed(transaction.now, stage, round_number, group_id, anchor, seconds))
