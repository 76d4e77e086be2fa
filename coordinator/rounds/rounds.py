"""The rules of one round: offers, the matched group, reports, and the decision.

A (stage, round) goes through offers -> group -> reports -> decision. A round opens when the round before it
is decided at every stage: no honest replica can be ahead, because its inner phase needs all stages.
Refusals are raised as HetnodeError. Events that a rule added before its refusal count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from coordinator.membership.strikes import judge, note_rejections, strike
from coordinator.membership.validation import bad_request, check_descriptor, check_host, live_peer
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
from coordinator.state.text import counted, listed
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
"""Most holders per payload in a manifest. With all of them it would grow with the square of the swarm."""


def offer(transaction: Transaction, spec: RunSpec, command: Offer, now: float) -> None:
    """Record an offered payload, and close the group if it is complete.

    A repeated offer, or an offer after the group was closed, changes nothing: the caller gets the existing
    group. An offer that no honest peer makes costs a strike.

    Raises:
        HetnodeError: UNKNOWN_PEER; BAD_REQUEST; ANCHOR_DIVERGED, which is also recorded; SEAT_LOST if the
            peer joined again, retreated or diverged since the plan was made.
    """
    sender, descriptor = command.peer, command.descriptor
    stage, round_number = descriptor.stage, descriptor.round_number
    live_peer(transaction.state, sender)
    if descriptor.owner != sender:
        raise bad_request(f"{sender} offers a payload of {descriptor.owner}")
    if (stage, round_number) in transaction.state.decisions:
        return
    check_host(transaction.state, spec, sender, stage, round_number)
    round_state = transaction.state.round_of(stage, round_number)
    if round_state.group is not None or round_state.offers.get(sender) == descriptor:
        return
    try:
        check_descriptor(transaction.state, spec, descriptor)
        if sender in round_state.offers:
            raise bad_request(f"{sender} has already offered another payload for this round")
    except HetnodeError as refusal:
        # The call came with the sender's certificate, so no other peer can have made this offer.
        strike(transaction, sender, round_number, refusal.cause, now)
        raise
    settled = settled_digest(transaction.state, stage, round_number - 1, Part.STAGE)
    agrees = settled in (None, descriptor.anchor_digest)
    # A peer with another anchor gets ANCHOR_DIVERGED below instead, because it must load the right one.
    if agrees and not transaction.state.takes_part(sender, round_number):
        raise HetnodeError(
            ErrorCode.SEAT_LOST,
            f"{sender} no longer takes part in round {round_number}: "
            "it joined again, retreated, or diverged.",
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
    """Record that the sender waits for a decision and offers no payload.

    The sender names the plan under which it hosts the stage. If that is the plan of the round, the group no
    longer waits for its offer. Without a plan it only asks: it may not know its new assignment yet.

    Raises:
        HetnodeError: UNKNOWN_PEER; BAD_REQUEST for a stage or round that will never be decided.
    """
    state, sender, stage, round_number = transaction.state, command.peer, command.stage, command.round_number
    live_peer(state, sender)
    if not (0 <= stage < spec.swarm.stages and 1 <= round_number <= spec.rounds):
        raise bad_request(f"there is no stage {stage} in round {round_number}")
    round_state = state.round_of(stage, round_number)
    is_open = round_number == state.current_round and (stage, round_number) not in state.decisions
    if not is_open or round_state.group is not None or sender in {*round_state.offers, *round_state.withheld}:
        return
    assignment = state.assignment(sender, round_number)
    hosts_stage = assignment is not None and stage in assignment.member.stages
    is_current_plan = command.withheld == state.plan_for(round_number).epoch
    if hosts_stage and is_current_plan and state.takes_part(sender, round_number):
        transaction.add(PayloadWithheld(now, stage, round_number, sender))
        advance(transaction, spec, stage, now)


def report(transaction: Transaction, spec: RunSpec, command: Report, now: float) -> None:
    """Record which payloads the sender holds or rejects, and decide the round if no other report is missing.

    Before the group is closed, a reported payload that its owner has not offered yet counts as its offer: the
    peers may have formed a group through the DHT while the coordinator was away. A payload is ignored if it
    starts from a diverged anchor, is too late for the group, or differs from the offer of its owner. A report
    after the decision changes nothing.

    Raises:
        HetnodeError: as :func:`offer`.
    """
    sender, stage, round_number, held = command.peer, command.stage, command.round_number, command.held
    live_peer(transaction.state, sender)
    if (stage, round_number) in transaction.state.decisions:
        return
    check_host(transaction.state, spec, sender, stage, round_number)
    round_state = transaction.state.round_of(stage, round_number)
    if len({descriptor.owner for descriptor in held}) != len(held):
        raise bad_request(f"{sender} reports two payloads of one owner")
    # All checks come before all changes: a refused report must not leave half of its payloads behind.
    unseen = [each for each in held if round_state.offers.get(each.owner) != each]
    for descriptor in unseen:
        if (descriptor.stage, descriptor.round_number) != (stage, round_number):
            raise bad_request(f"{sender} reports a payload of another stage or round")
        check_host(transaction.state, spec, descriptor.owner, stage, round_number)
        check_descriptor(transaction.state, spec, descriptor)
    for descriptor in unseen:
        if descriptor.owner in round_state.offers:
            # Both descriptors carry the owner's signature, so the sender cannot have made one up.
            strike(transaction, descriptor.owner, round_number, "it signed two payloads for one round", now)
        elif round_state.group is None:
            _admit(transaction, descriptor, now)
    note_rejections(transaction, sender, stage, round_number, command.rejected, now)
    offers = transaction.state.round_of(stage, round_number).offers
    before = round_state.reports.get(sender)
    # A peer may report again when it has more payloads. It cannot take a report back.
    owners = (before or frozenset()) | {d.owner for d in held if offers.get(d.owner) == d}
    if owners != before:
        transaction.add(HoldingsReported(now, stage, round_number, sender, tuple(sorted(owners))))
    advance(transaction, spec, stage, now)


def advance(transaction: Transaction, spec: RunSpec, stage: int, now: float) -> None:
    """Close the group and decide the current round of `stage`, if each of these is due at `now`."""
    state = transaction.state
    round_number = state.current_round
    is_decided = (stage, round_number) in state.decisions
    if not 1 <= round_number <= spec.rounds or is_decided or is_stalled(state, spec):
        return
    if state.round_of(stage, round_number).group is None:
        if not _group_is_due(state, spec, stage, round_number, now):
            why = _reason_without_offers(state, spec, stage, round_number, now)
            if why is not None:
                # Other stages have payloads, and the next round needs a decision of every stage.
                _conclude(transaction, spec, stage, (), why, now)
            return
        _close_group(transaction, spec, stage, round_number, now)
    round_state = transaction.state.round_of(stage, round_number)
    assert round_state.group is not None
    # After a restart the peers get the whole time again: they could not report in between.
    waits_since = max(round_state.closed_at, transaction.state.started_at)
    late = now - waits_since >= decide_seconds(spec, round_state.group)
    if late or not missing_reports(transaction.state, round_state):
        _decide(transaction, spec, stage, round_state, round_state.group, now)


def is_stalled(state: State, spec: RunSpec) -> bool:
    """Whether the run waits for peers: no replica of the round is complete, and no payload is offered.

    A stalled round is neither closed nor aborted: without its only holder of a stage, a run would otherwise
    spend all its rounds as aborted ones.
    """
    round_number = state.current_round
    is_idle = state.phase is RunPhase.TRAINING and round_number <= spec.rounds and state.opened_at is None
    return is_idle and not state.complete_replicas(round_number)


def resume(transaction: Transaction, spec: RunSpec, now: float) -> None:
    """End a stall when a replica is complete again: the round starts anew, with the same samples."""
    state = transaction.state
    if not is_stalled(state, spec):
        return
    round_number, newest = state.current_round, state.plans[-1]
    # Without this pause, members that cannot reach each other would get plans and retreat in a busy loop.
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
    """Names of the complete replicas that have neither offered nor withheld a payload yet."""
    round_state = state.round_of(stage, round_number)
    answered = {*round_state.offers, *round_state.withheld}
    replicas = state.complete_replicas(round_number)
    return [replica.name for replica in replicas if replica.host_of(stage).peer not in answered]


def missing_reports(state: State, round_state: Round) -> list[PeerId]:
    """The members of the group that have not reported yet, and that are live and still take part."""
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
    # A cheap check first: this runs for each offer, and the other check visits all replicas.
    plan = state.plan_for(round_number)
    answers = len(round_state.offers) + len(round_state.withheld) + len(state.absent.get(plan.epoch, ()))
    enough = answers >= len(plan.replicas)
    return enough and not missing_offers(state, stage, round_number)


def _reason_without_offers(
    state: State, spec: RunSpec, stage: int, round_number: int, now: float
) -> str | None:
    """Why this stage is decided without an offer; None while it waits.

    Without an offer at any stage, it waits without a deadline: an inner phase may take any time.
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
    """Commit the payloads with enough holders, or abort if there are none."""
    state = transaction.state
    # A single replica has no second holder.
    need = max(1, min(2, len(state.complete_replicas(state.current_round))))
    live_reports = [
        (peer, owners) for peer, owners in sorted(round_state.reports.items()) if state.peers[peer].is_live
    ]
    entries, left_out = [], []
    for position, descriptor in enumerate(group.descriptors):
        holders = [peer for peer, owners in live_reports if descriptor.owner in owners]
        # With `need` alone, two liars could commit a payload that no other peer can fetch, and stop the run.
        if len(holders) < need or 2 * len(holders) <= len(live_reports):
            assignment = state.assignment(descriptor.owner, descriptor.round_number)
            left_out.append(assignment.replica.name if assignment else descriptor.owner)
            continue
        start = position % len(holders)  # not the same MAX_HOLDERS for every payload: spreads the downloads
        holders = [*holders[start:], *holders[:start]][:MAX_HOLDERS]
        entries.append(ManifestEntry(descriptor, tuple(sorted(holders))))
    peers = counted(need, "peer")
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
    """The epoch of the plan for the next round. The first decision of a round fixes it for all stages.

    So all members change plans at the same step without a vote.
    """
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

    While no digest is settled, every offer is recorded: :func:`_close_group` takes the majority.
    """
    key = (descriptor.stage, descriptor.round_number - 1, Part.STAGE)
    expected = settled_digest(transaction.state, *key) or descriptor.anchor_digest
    if descriptor.anchor_digest != expected:
        note_divergence(transaction, key, descriptor.owner, descriptor.anchor_digest, expected, now)
        return expected
    transaction.add(PayloadOffered(now, descriptor))
    return None


def _close_group(transaction: Transaction, spec: RunSpec, stage: int, round_number: int, now: float) -> None:
    """Close the group over the common anchor. Offers from another anchor are recorded as diverged."""
    key = (stage, round_number - 1, Part.STAGE)
    offers = transaction.state.round_of(stage, round_number).offers.values()
    votes = Counter(descriptor.anchor_digest for descriptor in offers)
    anchor = settled_digest(transaction.state, *key) or votes.most_common(1)[0][0]
    nbytes = 0
    for descriptor in offers:
        if descriptor.anchor_digest == anchor:
            nbytes += descriptor.nbytes
        else:
            note_divergence(transaction, key, descriptor.owner, descriptor.anchor_digest, anchor, now)
    seconds = gather_seconds(transaction.state, spec, stage, nbytes)
    group_id = f"{spec.run_id}/{stage}/{round_number}"
    transaction.add(GroupClosed(now, stage, round_number, group_id, anchor, seconds))
