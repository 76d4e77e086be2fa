"""The (stage, round)s that are not decided yet, and the rows of their events and decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from coordinator.history.planned import Planned
from coordinator.history.rows import (
    ABORTED,
    COMMITTED,
    OFFERED,
    OPEN,
    SKIPPED,
    WITHHELD,
    Counted,
    Credited,
    Decided,
    LeftOut,
    Missed,
    Offered,
    Reported,
    RoundTokens,
    Row,
    StageRoundNow,
    cut,
    milliseconds,
)
from coordinator.state import events
from coordinator.state.text import counted, short
from protocol.types import Decision, Finding, PeerId, Plan


@dataclass(frozen=True)
class Reason:
    """A sentence about a peer, and the event that it comes from."""

    sequence: int
    text: str


@dataclass
class OpenStage:
    """One stage of the open round.

    Attributes:
        offers: by owner, the bytes of its payload.
        problems: why the payload of an owner may not count.
    """

    offers: dict[PeerId, int] = field(default_factory=dict)
    withheld: set[PeerId] = field(default_factory=set)
    rejections: dict[PeerId, int] = field(default_factory=dict)
    problems: dict[PeerId, Reason] = field(default_factory=dict)
    first_offer_at: int | None = None
    closed_at: int | None = None
    closed_sequence: int = 0
    gather: int = 0
    last_report_at: int | None = None
    contested: int = 0


class OpenRound:
    """The stages of the round that is being decided.

    Args:
        numbers: of the peers in the history.
        absences: by peer, the newest reason why it does not take part.
    """

    def __init__(
        self, planned: Planned, numbers: Mapping[PeerId, int], absences: Mapping[PeerId, Reason]
    ) -> None:
        self._planned, self._numbers, self._absences = planned, numbers, absences
        self._stages: dict[int, OpenStage] = {}
        self._decided: set[int] = set()

    def begin(self) -> None:
        """Another round begins, or the same one anew."""
        self._stages, self._decided = {}, set()

    @property
    def is_new(self) -> bool:
        """Whether nothing has happened in it."""
        return not self._stages and not self._decided

    @property
    def decided(self) -> int:
        """The number of stages that are decided."""
        return len(self._decided)

    def rows(
        self, sequence: int, event: events.ExchangeEvent | events.PayloadsContested | events.PayloadArbitrated
    ) -> Iterator[Row]:
        match event:
            case events.PayloadOffered(descriptor=payload):
                stage = self._stage(payload.stage)
                stage.offers[payload.owner] = payload.nbytes
                answer = OFFERED, payload.weight, payload.nbytes
                yield from self._answer(
                    sequence, event.at, payload.stage, payload.round_number, payload.owner, *answer
                )
            case events.PayloadWithheld():
                self._stage(event.stage).withheld.add(event.peer)
                yield from self._answer(
                    sequence, event.at, event.stage, event.round_number, event.peer, WITHHELD, 0.0, 0
                )
            case events.HoldingsReported():
                at = milliseconds(event.at)
                self._stage(event.stage).last_report_at = at
                where = event.round_number, event.stage, self._numbers[event.peer]
                yield Reported(at, sequence, event.count, *where)
            case events.GroupClosed():
                stage = self._stage(event.stage)
                stage.closed_at, stage.closed_sequence = milliseconds(event.at), sequence
                stage.gather = milliseconds(event.seconds)
                yield self._now(event.stage, event.round_number)
            case events.PayloadsContested():
                stage = self._stage(event.stage)
                stage.contested = len(event.owners)
                for owner in event.left_out:
                    text = "too few members of the group hold its payload"
                    stage.problems.setdefault(owner, Reason(sequence, text))
                yield self._now(event.stage, event.round_number)
            case events.PayloadRejected():
                self._note_rejection(sequence, event)
            case events.PayloadArbitrated(verdict=verdict):
                if verdict.finding is not Finding.HELD:
                    text = f"the arbiter found its payload {verdict.finding.value}: {verdict.reason}"
                    self._stage(event.stage).problems[event.owner] = Reason(sequence, text)

    def _note_rejection(self, sequence: int, event: events.PayloadRejected) -> None:
        stage = self._stage(event.stage)
        times = stage.rejections[event.owner] = stage.rejections.get(event.owner, 0) + 1
        text = f"{counted(times, 'member')} of the group rejected its payload: {event.reason}"
        stage.problems[event.owner] = Reason(sequence, text)

    def note_divergence(self, sequence: int, event: events.AnchorDiverged) -> None:
        """The payload of a diverged peer is not in the group, which starts from the anchor of the others."""
        self._stage(event.stage).problems[event.peer] = Reason(
            sequence, "its payload starts from another anchor than those of the others"
        )

    def decide(self, sequence: int, at: float, decision: Decision, is_skipped: bool) -> Iterator[Row]:
        stage, round_number = self._stage(decision.stage), decision.round_number
        where, owners = (round_number, decision.stage), set[PeerId]()
        tokens = payload_bytes = 0
        for descriptor in (entry.descriptor for entry in decision.entries):
            owners.add(descriptor.owner)
            worth, number = self._planned.tokens_of(descriptor), self._numbers[descriptor.owner]
            tokens, payload_bytes = tokens + worth, payload_bytes + descriptor.nbytes
            yield Counted(worth, *where, number)
            yield Credited(worth, descriptor.nbytes, round_number, round_number, sequence, number)
        for owner in stage.offers.keys() - owners:
            problem = stage.problems.get(owner)
            if problem is None and decision.committed:
                problem = Reason(sequence, "too few members of the group hold its payload")
            reason = None if problem is None else cut(problem.text)
            cited = sequence if problem is None else problem.sequence
            yield LeftOut(reason, cited, *where, self._numbers[owner])
        if not is_skipped:  # no payload was expected
            yield from self._missed(decision, stage)
        outcome = COMMITTED if decision.committed else SKIPPED if is_skipped else ABORTED
        totals = len(owners), payload_bytes, tokens
        yield self._now(
            decision.stage, round_number, outcome, milliseconds(at), sequence, *totals, cut(decision.reason)
        )
        run_tokens = tokens if decision.stage == 0 else 0
        is_aborted = outcome == ABORTED and decision.restore_round is None
        yield Decided(int(decision.committed), int(is_aborted), run_tokens, tokens)
        if decision.stage == 0:
            yield RoundTokens(tokens, round_number)
        self._stages.pop(decision.stage, None)
        self._decided.add(decision.stage)

    def _missed(self, decision: Decision, stage: OpenStage) -> Iterator[Missed]:
        round_number = decision.round_number
        plan, plan_sequence = self._planned.of_round(round_number)
        for replica in plan.replicas:
            host = replica.host_of(decision.stage).peer
            if host in stage.offers or host in stage.withheld:
                continue
            problem = stage.problems.get(host) or self._absence(plan, host, plan_sequence)
            number = self._numbers[host]
            reason = cut(problem.text), problem.sequence
            yield Missed(round_number, decision.stage, number, replica.index, *reason)

    def _absence(self, plan: Plan, host: PeerId, since: int) -> Reason:
        """Why `host` has not answered, from what has happened to it or its replica since its plan."""
        own = self._absences.get(host)
        if own is not None and own.sequence > since:
            return own
        replica = self._planned.replica_of(plan, host)
        for member in replica.members if replica else ():
            other = self._absences.get(member.peer)
            if other is not None and other.sequence > since:
                return Reason(other.sequence, f"its replica lacked {short(member.peer)}: {other.text}")
        return Reason(0, "no offer came before the round closed")

    def _answer(
        self,
        sequence: int,
        at: float,
        stage: int,
        round_number: int,
        peer: PeerId,
        standing: int,
        weight: float,
        nbytes: int,
    ) -> Iterator[Row]:
        plan, _ = self._planned.of_round(round_number)
        replica, time = self._planned.replica_of(plan, peer), milliseconds(at)
        index = -1 if replica is None else replica.index
        where = round_number, stage, self._numbers[peer]
        yield Offered(*where, index, standing, time, sequence, weight, nbytes)
        known = self._stage(stage)
        if known.first_offer_at is None:
            known.first_offer_at = time
            yield self._now(stage, round_number)

    def _now(
        self,
        stage: int,
        round_number: int,
        outcome: int = OPEN,
        decided_at: int | None = None,
        decided_sequence: int = 0,
        counted: int = 0,
        payload_bytes: int = 0,
        tokens: int = 0,
        reason: str | None = None,
    ) -> StageRoundNow:
        known = self._stage(stage)
        return StageRoundNow(
            round_number,
            stage,
            outcome,
            decided_at,
            decided_sequence,
            known.first_offer_at,
            known.closed_at,
            known.closed_sequence,
            known.gather,
            known.last_report_at,
            known.contested,
            len(known.offers),
            counted,
            payload_bytes,
            tokens,
            reason,
        )

    def _stage(self, stage: int) -> OpenStage:
        return self._stages.setdefault(stage, OpenStage())
