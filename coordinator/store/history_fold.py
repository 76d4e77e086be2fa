"""The one fold of the event log besides the state's: what an event adds to the history, and a measurement.

A pure function of the event and of the states before and after it, which have the plan, the offers and the
reports of every open round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from coordinator.run.state import events
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.run.state.tokens import worths
from coordinator.status.messages import event_message
from coordinator.store.history_tables import (
    AdoptedPlan,
    BegunAnew,
    Change,
    Contribution,
    EstimatePoint,
    EvaluatedFigure,
    EvaluatedSample,
    JournalLine,
    Kind,
    MemberFigures,
    Omission,
    PeerTotals,
    ReplicaRound,
    RoundRow,
    RoundSums,
    RunTotals,
    StageOutcome,
    StageRow,
    Standing,
)
from protocol.status import Measurement, ModelEvaluation
from protocol.types import (
    Aborted,
    Committed,
    Decision,
    Finding,
    Part,
    PeerId,
    RolledBack,
    Skipped,
    entries_of,
)

MOST_TEXT = 400
"""Letters of a text that are kept."""
_MOST_COUNT = 2**48
"""SQLite has no greater integers than 2^63, and sums of what peers claim must stay below."""
_RUN = PeerId("")
"""The peer of the journal's lines about the run."""
_TOLD: dict[type[Event], Kind] = {
    events.PeerJoined: Kind.JOINED,
    events.RoleChanged: Kind.ROLE,
    events.AddressesChanged: Kind.ADDRESSES,
    events.LinkFailed: Kind.LINK_FAILED,
    events.PeerDraining: Kind.DRAINS,
    events.PeerLeft: Kind.LEFT,
    events.PeerLost: Kind.LOST,
    events.PeerRetreated: Kind.RETREATED,
    events.AssignmentReserved: Kind.RESERVED,
    events.PeerStruck: Kind.STRIKE,
    events.PeerWeighed: Kind.WEIGHED,
    events.PeerQuarantined: Kind.QUARANTINED,
    events.PeerBanned: Kind.BANNED,
    events.PeerUnbanned: Kind.UNBANNED,
    events.AnchorDiverged: Kind.DIVERGED,
    events.PayloadRejected: Kind.REJECTED,
    events.PayloadArbitrated: Kind.ARBITRATED,
    events.CoordinatorStarted: Kind.STARTED,
    events.PlanAdopted: Kind.PLAN,
    events.PayloadsContested: Kind.CONTESTED,
    events.RunPaused: Kind.PAUSED,
    events.RunResumed: Kind.RESUMED,
    events.RunRolledBack: Kind.ROLLED_BACK,
    events.RunChanged: Kind.CHANGED,
    events.AlarmRaised: Kind.ALARM,
}
"""Events with a line in the journal."""
_FAILURES = {Kind.LOST, Kind.RETREATED, Kind.DIVERGED}
_PRESENCE = {Kind.JOINED: True, Kind.LEFT: False, Kind.LOST: False, Kind.QUARANTINED: False}
"""Whether a peer is here after such an event. A PeerLeft event follows the ban of a live peer."""
_OUTCOMES: dict[type[Decision], StageOutcome] = {
    Committed: StageOutcome.COMMITTED,
    Aborted: StageOutcome.ABORTED,
    RolledBack: StageOutcome.ABORTED,
    Skipped: StageOutcome.SKIPPED,
}
_Where: TypeAlias = tuple[int, int]
"""Round and stage."""


def bounded(count: int) -> int:
    """`count`, as a peer claims it, as the history can keep it."""
    return max(0, min(count, _MOST_COUNT))


def finite(value: float | None) -> float | None:
    """None for what is no finite number: the metrics file has none of these either."""
    return value if value is not None and math.isfinite(value) else None


def cut(text: str) -> str:
    """`text` with a bounded length, as SQLite can keep it."""
    return text[:MOST_TEXT].encode("utf-8", "replace").decode()


def changes_of(sequence: int, event: Event, before: State, after: State) -> Iterator[Change]:
    """What the event with this number in the log changes, which led from state `before` to `after`."""
    yield from _peer(event, before)
    if isinstance(event, events.PeerNamed) and event.peer in after.peers:
        yield PeerTotals(event.peer, name=after.name_of(event.peer))
    if isinstance(event, events.OwnerBound):
        yield PeerTotals(event.binding.peer, owner=event.binding.owner)
    if type(event) in _TOLD:
        yield from _lines(sequence, event, before)
    match event:
        case events.PeerMeasured():
            flops = finite(event.estimates.capacity.flops)
            yield EstimatePoint(event.peer, sequence, event.at, flops)
        case events.PlanAdopted(plan=plan):
            size = len(plan.replicas), plan.size
            yield AdoptedPlan(plan.epoch, sequence, event.at, plan.from_round, *size, cut(plan.reason))
            if plan.from_round == after.current_round and not plan.repairs:
                # Offers of the former plan are void: its samples were divided among other replicas.
                yield BegunAnew(plan.from_round)
                yield _begin(plan.from_round, plan.epoch, event.at, sequence)
        case events.ModelEvaluated(evaluation=told):
            yield from _evaluated(told, event.at)
        case events.RoundDecided():
            yield from _decision(sequence, event, before, after)
        case _:
            yield from _exchange(sequence, event, before)


def _peer(event: Event, before: State) -> Iterator[PeerTotals]:
    kind, peer = _TOLD.get(type(event)), PeerId(getattr(event, "peer", None) or "")
    is_here = _PRESENCE.get(kind) if kind else None
    if kind is Kind.JOINED or (peer in before.peers and (is_here is False or kind is Kind.ROLE)):
        yield PeerTotals(peer, getattr(event, "role", None), is_here=is_here)
    if peer in before.peers and (kind is Kind.STRIKE or kind in _FAILURES):
        yield PeerTotals(peer, strikes=int(kind is Kind.STRIKE), failures=int(kind in _FAILURES))


def _lines(sequence: int, event: Event, before: State) -> Iterator[JournalLine]:
    """The lines of the journal: one for each peer that the event is about, and that has joined."""
    kind, source = _TOLD[type(event)], _about(event)
    text, seconds = cut(event_message(event)), _seconds(event, before)
    round_number = getattr(source, "round_number", before.current_round)
    if isinstance(event, events.RunPaused | events.PlanAdopted):
        round_number = event.from_round if isinstance(event, events.RunPaused) else event.plan.from_round
    is_payload = kind in (Kind.REJECTED, Kind.ARBITRATED)
    peers = [getattr(source, "owner" if is_payload else "peer", _RUN)]
    if isinstance(event, events.LinkFailed):
        peers.append(event.neighbour)
    stage = getattr(source, "stage", None)
    for peer in peers:
        if peer in before.peers or peer == _RUN or kind is Kind.JOINED:
            yield JournalLine(peer, sequence, event.at, round_number, kind, text, stage, seconds)


def _about(event: Event) -> Any:
    return event.reservation if isinstance(event, events.AssignmentReserved) else event


def _seconds(event: Event, before: State) -> float | None:
    match event:
        case events.CoordinatorStarted() if before.latest_at:
            return max(0.0, event.at - before.latest_at)
        case events.PeerLost():
            return event.silent_seconds
        case events.PayloadsContested():
            return event.seconds
        case _:
            return None


def _exchange(sequence: int, event: Event, before: State) -> Iterator[Change]:
    match event:
        case events.PayloadOffered(descriptor=payload):
            where = payload.round_number, payload.stage
            is_new = payload.owner not in before.round_of(where[1], where[0]).offers
            yield StageRow(*where, StageOutcome.OPEN, first_offer_at=event.at, offered=int(is_new))
            replica = _replica_of(before, payload.round_number, payload.owner)
            size = payload.nbytes
            yield Contribution(
                *where, payload.owner, replica, Standing.OFFERED, event.at, sequence, nbytes=size
            )
        case events.PayloadWithheld():
            where = event.round_number, event.stage
            yield StageRow(*where, StageOutcome.OPEN, first_offer_at=event.at)
            replica = _replica_of(before, event.round_number, event.peer)
            yield Contribution(*where, event.peer, replica, Standing.WITHHELD, event.at, sequence)
        case events.HoldingsReported():
            where = event.round_number, event.stage
            yield StageRow(*where, last_report_at=event.at)
            yield Contribution(
                *where, event.peer, reported_at=event.at, reported_sequence=sequence, held=event.count
            )
        case events.GroupClosed():
            where = event.round_number, event.stage
            yield StageRow(*where, StageOutcome.OPEN, closed_at=event.at, closed_sequence=sequence)
        case events.PayloadsContested():
            yield StageRow(event.round_number, event.stage, contested=len(event.owners))


def _evaluated(told: ModelEvaluation, at: float) -> Iterator[Change]:
    for metric, value in told.figures.items():
        yield EvaluatedFigure(told.name, metric, told.peer, told.round_number, at, value)
    for number, each in enumerate(told.samples):
        yield EvaluatedSample(told.round_number, told.peer, told.name, number, each.prompt, each.text)


def _replica_of(state: State, round_number: int, peer: PeerId) -> int:
    """The index of its replica; -1 if the plan does not include the peer."""
    assignment = state.assignment(peer, round_number)
    return assignment.replica.index if assignment else -1


def _decision(sequence: int, event: events.RoundDecided, before: State, after: State) -> Iterator[Change]:
    decision, at = event.decision, event.at
    where = decision.round_number, decision.stage
    if where[0] > before.current_round and where[1] == 0:  # an older copy goes on after unknown rounds
        yield _begin(where[0], decision.next_epoch, at, sequence)
    tokens = nbytes = 0
    for payload, worth in worths(before, decision):
        tokens, nbytes = tokens + worth, nbytes + payload.nbytes
        yield Contribution(*where, payload.owner, standing=Standing.COUNTED, tokens=worth)
        yield PeerTotals(
            payload.owner,
            stage_tokens=worth,
            stage_rounds=1,
            payload_bytes=payload.nbytes,
            first_round=decision.round_number,
            last_round=decision.round_number,
            credit_sequence=sequence,
        )
    yield from _not_counted(decision, before)
    yield StageRow(
        *where,
        _OUTCOMES[type(decision)],
        decided_at=at,
        decided_sequence=sequence,
        counted=len(entries_of(decision)),
        payload_bytes=nbytes,
        tokens=tokens,
        reason=cut(decision.reason),
    )
    run_tokens = tokens if decision.stage == 0 else 0
    yield RunTotals(tokens=run_tokens, stage_tokens=tokens)
    is_over = after.current_round != before.current_round
    yield RoundRow(where[0], decided_at=at if is_over else None, tokens=run_tokens)
    if is_over and after.current_round <= after.spec.rounds:
        epoch = after.plan_for(after.current_round).epoch
        yield _begin(after.current_round, epoch, at, sequence)


def _begin(round_number: int, epoch: int, at: float, sequence: int) -> RoundRow:
    return RoundRow(round_number, epoch, at, sequence, at, sequence, begins=1)


def _not_counted(decision: Decision, before: State) -> Iterator[Contribution]:
    """The members whose payloads are not in a manifest, and those without any answer."""
    round_number, stage = where = decision.round_number, decision.stage
    known = before.round_of(stage, round_number)
    counted = {entry.descriptor.owner for entry in entries_of(decision)}
    for owner in known.offers:
        if owner not in counted:
            yield _left_out(before, where, owner, isinstance(decision, Committed))
    if isinstance(decision, Skipped):  # no answer was expected
        return
    for replica in before.plan_for(round_number).replicas:
        host = replica.host_of(stage).peer
        if host not in known.offers and host not in known.withheld:
            yield Contribution(*where, host, replica.index, Standing.MISSING)


def _left_out(before: State, where: _Where, owner: PeerId, is_committed: bool) -> Contribution:
    round_number, stage = where
    known = before.round_of(stage, round_number)
    rejections = known.rejections.get(owner, {})
    verdict = known.contest.verdicts.get(owner) if known.contest else None
    cause, detail = Omission.UNHELD if is_committed else Omission.DECISION, None
    if before.is_weightless(owner, round_number):
        found: tuple[str, str | None] = Kind.WEIGHED, None
    elif verdict is not None and verdict.finding is not Finding.HELD:
        found = Kind.ARBITRATED, verdict.reason or verdict.finding.value
    elif (owner, stage, round_number - 1, Part.STAGE) in before.diverged:
        found = Kind.DIVERGED, None
    elif rejections:
        found = Kind.REJECTED, [*rejections.values()][-1]
    else:
        is_unheld = known.contest is not None and owner in known.contest.left_out
        found = Omission.UNHELD if is_unheld else cause, detail
    words = cut(found[1]) if found[1] else None
    return Contribution(
        *where,
        owner,
        standing=Standing.LEFT_OUT,
        cause=found[0],
        detail=words,
        rejections=len(rejections) or None,
    )


def changes_of_measurement(at: float, measured: Measurement) -> Iterator[Change]:
    """What a measurement changes: all or nothing, as its peer and round may be known already."""
    is_last, round_number = measured.complete, measured.round_number
    # Before its first round the model is only validated.
    train = finite(measured.train_loss) if is_last and round_number else None
    validation = finite(measured.validation_loss) if is_last else None
    traffic = {
        "link_bytes": bounded(measured.link_bytes_sent),
        "link_bytes_dense": bounded(measured.link_bytes_dense),
        "payload_bytes": bounded(measured.payload_bytes),
        "payload_bytes_dense": bounded(measured.payload_bytes_dense),
    }
    yield MemberFigures(
        round_number,
        measured.replica,
        measured.position,
        measured.peer,
        at,
        is_last,
        train,
        validation,
        bounded(measured.tokens) if is_last else 0,
        _duration(measured.inner_seconds),
        _duration(measured.outer_seconds),
        _duration(measured.compute_seconds),
        finite(measured.gradient_norm),
        bounded(measured.steps),
        **traffic,
        progress_norm=finite(measured.progress_norm),
        error_norm=finite(measured.error_norm),
        nonfinite_step=bounded(measured.nonfinite_step),
    )
    yield PeerTotals(measured.peer, link_bytes=traffic["link_bytes"])
    if is_last:
        yield ReplicaRound(measured.replica, round_number, at, validation, train)
    yield RoundSums(
        round_number,
        at,
        losses=int(validation is not None),
        validation_sum=validation or 0.0,
        least=validation,
        greatest=validation,
        train_losses=int(train is not None),
        train_sum=train or 0.0,
        **traffic,
    )
    for each in measured.agreements:
        if math.isfinite(each.norm):
            cosine = finite(each.cosine)
            yield Contribution(round_number, each.stage, each.owner, cosine=cosine, norm=each.norm)


def _duration(seconds: float) -> float:
    """A duration as a peer claims it: finite, not negative, and no more than sums can take."""
    return max(0.0, min(seconds, float(_MOST_COUNT))) if math.isfinite(seconds) else 0.0
