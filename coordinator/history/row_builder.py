"""Turns the events of a run, and what its members measure, into the rows of its history."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from coordinator.history import plan_body
from coordinator.history.open_round import OpenRound, Reason
from coordinator.history.planned import Planned, PlansKept
from coordinator.history.rows import (
    Agreed,
    Estimated,
    Finished,
    Measured,
    PeerAdded,
    PeerChanged,
    PeerNow,
    PlanAdded,
    ReplicaPlanned,
    RoundBegun,
    RoundDecided,
    RoundVoid,
    Row,
    SessionBegun,
    SessionEnded,
    bounded,
    cut,
    finite,
    milliseconds,
)
from coordinator.state import events
from coordinator.state.events import Event
from coordinator.status.messages import event_message
from protocol.spec.run import RunSpec
from protocol.status import Measurement
from protocol.types import Part, PeerId, Plan

_Change: TypeAlias = (
    events.RoleChanged
    | events.ConnectionEvent
    | events.PeerDraining
    | events.PeerLeft
    | events.PeerLost
    | events.ExclusionEvent
    | events.AnchorDiverged
)
_ENDS: dict[type[Event], str] = {
    events.PeerLeft: "left",
    events.PeerLost: "lost",
    events.PeerQuarantined: "quarantined",
}
"""Events that end a session. A PeerLeft event follows the ban of a live peer."""
_KINDS: dict[type[Event], str] = {
    events.RoleChanged: "role",
    events.AddressesChanged: "addresses",
    events.LinkFailed: "link failed",
    events.PeerDraining: "drains",
    events.PeerRetreated: "retreated",
    events.PeerStruck: "strike",
    events.PeerBanned: "banned",
    events.PeerUnbanned: "unbanned",
    events.AnchorDiverged: "diverged",
    **_ENDS,
}
"""What the journal of a peer calls an event."""
_FAILURES = (events.PeerLost, events.PeerRetreated, events.AnchorDiverged)
_ABSENCES = (*_ENDS, *_FAILURES, events.LinkFailed, events.PeerBanned)


@dataclass(frozen=True)
class BuilderRecord:
    """All that a builder knows between two rounds."""

    numbers: Mapping[PeerId, int] = field(default_factory=dict)
    absences: Mapping[PeerId, Reason] = field(default_factory=dict)
    plans: PlansKept = ()
    round_number: int = 0


class RowBuilder:
    """Give it all events of a run in order, from the first one on or from the first one after `former`.

    The state is small: the plans, which the run keeps as well, the open round, and a number for each peer, in
    the order of their first joins. So the same events lead to the same rows in every process.
    """

    def __init__(self, spec: RunSpec, former: BuilderRecord = BuilderRecord()) -> None:
        self._spec = spec
        self._numbers, self._absences = dict(former.numbers), dict(former.absences)
        self._planned = Planned(spec, former.plans)
        self._open = OpenRound(self._planned, self._numbers, self._absences)
        self._round = former.round_number

    @property
    def known(self) -> BuilderRecord | None:
        """What it knows; None while a round is being decided."""
        if not self._open.is_new:
            return None
        return BuilderRecord(dict(self._numbers), dict(self._absences), self._planned.plans, self._round)

    def of_event(self, sequence: int, event: Event) -> list[Row]:
        """The rows of the event with this number in the log. Many events have none."""
        return list(self._rows(sequence, event))

    def of_measurement(self, at: float, measured: Measurement) -> list[Row]:
        """The rows of a measurement; none if its peer has not joined."""
        number = self._numbers.get(measured.peer)
        if number is None:
            return []
        is_last = measured.complete
        row = Measured(
            round_number=measured.round_number,
            replica=measured.replica,
            position=measured.position,
            peer=number,
            at=milliseconds(at),
            is_last=is_last,
            # Before its first round the model is only validated.
            train_loss=finite(measured.train_loss) if is_last and measured.round_number else None,
            validation_loss=finite(measured.validation_loss) if is_last else None,
            tokens=bounded(measured.tokens) if is_last else 0,
            inner=bounded(milliseconds(measured.inner_seconds)),
            outer=bounded(milliseconds(measured.outer_seconds)),
            compute=bounded(milliseconds(measured.compute_seconds)),
            gradient_norm=finite(measured.gradient_norm),
            steps=bounded(measured.steps),
            extra_steps=bounded(measured.extra_steps),
            microbatches=bounded(measured.microbatches),
            link_bytes=bounded(measured.link_bytes_sent),
            link_bytes_dense=bounded(measured.link_bytes_dense),
            payload_bytes=bounded(measured.payload_bytes),
            payload_bytes_dense=bounded(measured.payload_bytes_dense),
            progress_norm=finite(measured.progress_norm),
            error_norm=finite(measured.error_norm),
        )
        return [row, *self._agreements(measured)]

    def _agreements(self, measured: Measurement) -> Iterator[Agreed]:
        for each in measured.agreements:
            owner = self._numbers.get(each.owner)
            if owner is not None and math.isfinite(each.norm):
                cosine = None if each.cosine is None else finite(each.cosine)
                yield Agreed(cosine, each.norm, measured.round_number, each.stage, owner)

    def _rows(self, sequence: int, event: Event) -> Iterator[Row]:
        match event:
            case events.PeerJoined():
                yield from self._join(sequence, event)
            case events.PeerMeasured():
                yield from self._estimate(sequence, event)
            case events.PlanAdopted():
                yield from self._adopt(sequence, event)
            case events.RoundCommitted() | events.RoundAborted() | events.StageSkipped():
                yield from self._decide(sequence, event)
            case events.PayloadRejected() | events.PayloadArbitrated():
                yield from self._open.rows(sequence, event)
                kind = "rejected" if isinstance(event, events.PayloadRejected) else "arbitrated"
                yield from self._journal(sequence, event, event.owner, kind)
            case (
                events.PayloadOffered()
                | events.PayloadWithheld()
                | events.GroupClosed()
                | events.HoldingsReported()
                | events.PayloadsContested()
            ):
                yield from self._open.rows(sequence, event)
            case events.AssignmentReserved(reservation=reservation):
                yield from self._journal(sequence, event, reservation.peer, "reserved")
            case events.RunFinished():
                yield Finished(milliseconds(event.at))
            case _ if isinstance(event, _Change):
                yield from self._change(sequence, event)
            case _:
                return

    def _join(self, sequence: int, event: events.PeerJoined) -> Iterator[Row]:
        at, number = milliseconds(event.at), self._numbers.get(event.peer)
        if number is None:
            number = self._numbers[event.peer] = len(self._numbers) + 1
            yield PeerAdded(number, event.peer, event.role, at)
        yield SessionEnded(at, sequence, "joined again", "", number)
        reachability = event.reachability.value if event.reachability else None
        device = cut(event.capacity.device)
        yield SessionBegun(number, sequence, at, event.role, device, reachability)
        yield PeerNow(event.role, True, 1, 0, 0, at, "joined", sequence, number)
        yield from self._journal(sequence, event, event.peer, "joined")
        self._absences[event.peer] = Reason(sequence, "it has joined again since this plan was made")

    def _change(self, sequence: int, event: _Change) -> Iterator[Row]:
        number, at, kind = self._numbers.get(event.peer), milliseconds(event.at), _KINDS[type(event)]
        if number is None:
            return
        end = _ENDS.get(type(event))
        if end is not None:
            reason = cut(event.reason) if isinstance(event, events.PeerLeft) else ""
            yield SessionEnded(at, sequence, end, reason, number)
        role = event.role if isinstance(event, events.RoleChanged) else None
        is_here = None if end is None else False
        strikes, failures = isinstance(event, events.PeerStruck), isinstance(event, _FAILURES)
        yield PeerNow(role, is_here, 0, int(strikes), int(failures), at, kind, sequence, number)
        yield from self._journal(sequence, event, event.peer, kind)
        if isinstance(event, _ABSENCES):
            self._absences[event.peer] = Reason(sequence, _absence(event, kind))
        match event:
            # An older anchor is that of no payload of the open round.
            case events.AnchorDiverged(part=Part.STAGE) if event.round_number == self._round - 1:
                self._open.note_divergence(sequence, event)

    def _journal(self, sequence: int, event: Event, peer: PeerId, kind: str) -> Iterator[Row]:
        number = self._numbers.get(peer)
        if number is not None:
            text = cut(event_message(event))
            yield PeerChanged(number, sequence, milliseconds(event.at), self._round, kind, text)

    def _estimate(self, sequence: int, event: events.PeerMeasured) -> Iterator[Row]:
        capacity, number = event.estimates.capacity, self._numbers.get(event.peer)
        if number is not None:
            yield Estimated(
                number,
                sequence,
                milliseconds(event.at),
                finite(capacity.flops),
                finite(capacity.uplink),
                finite(capacity.downlink),
                finite(capacity.round_trip),
                finite(event.estimates.microbatch_seconds),
            )

    def _adopt(self, sequence: int, event: events.PlanAdopted) -> Iterator[Row]:
        plan, at = event.plan, milliseconds(event.at)
        self._planned.add(plan, sequence)
        members = plan.size
        body = plan_body.encode(plan.replicas, self._numbers)
        about = plan.from_round, plan.first_sample, len(plan.replicas), members, cut(plan.reason)
        yield PlanAdded(plan.epoch, sequence, at, *about, body)
        for replica in plan.replicas:
            numbers = ",".join(str(self._numbers[member.peer]) for member in replica.members)
            yield ReplicaPlanned(replica.index, plan.epoch, numbers)
        if self._round == 0:
            yield self._begin(plan.from_round, plan, at, sequence)
        elif plan.from_round == self._round:
            # Offers of the former plan are void: its samples were divided among other replicas.
            yield RoundVoid(self._round)
            yield self._begin(self._round, plan, at, sequence)

    def _decide(self, sequence: int, event: events.DecisionEvent) -> Iterator[Row]:
        decision, at = event.decision, milliseconds(event.at)
        is_skipped = isinstance(event, events.StageSkipped)
        yield from self._open.decide(sequence, event.at, decision, is_skipped)
        if self._open.decided < self._spec.swarm.stages:
            return
        yield RoundDecided(at, decision.round_number)
        self._open.begin()
        following = decision.round_number + 1
        if following <= self._spec.rounds:
            yield self._begin(following, self._planned.of_round(following)[0], at, sequence)
        self._round = following

    def _begin(self, round_number: int, plan: Plan, at: int, sequence: int) -> RoundBegun:
        self._round = round_number
        self._open.begin()
        return RoundBegun(round_number, plan.epoch, at, sequence)


def _absence(event: Event, kind: str) -> str:
    """Why the peer of `event` does not take part from then on, as a part of a sentence."""
    match event:
        case events.PeerLost():
            return f"it was lost, silent for {event.silent_seconds:.0f} s"
        case events.PeerLeft() | events.PeerBanned():
            return f"it was banned: {event.reason}" if kind == "banned" else f"it left: {event.reason}"
        case events.PeerRetreated():
            return f"it retreated: {event.reason}"
        case events.LinkFailed():
            return f"it could not open its link: {event.reason}"
        case events.AnchorDiverged():
            return "its anchor differed from that of the others"
        case _:
            return f"it was {kind}"
