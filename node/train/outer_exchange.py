"""The outer rounds of one member: propose, exchange, report, and apply what the coordinator committed.

The decisions of the coordinator are a log, and every anchor is the result of the decisions up to some round.
A member that contributes proposes a payload before it applies a decision. A member that joined late, came
back or was cut off applies the decisions that it has missed, one after the other.

All stages do this at the same time, each in a transaction of its own. A member that does not host stage 0
also follows the decisions on stage 0, because the committed embedding must reach every member of every
replica.

One file because what a member applies, and in which order, is decided in one place.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from node.exchange.transport import RoundEnd
from node.ipc.worker_calls import (
    Digests,
    LoadInitialPart,
    LoadPart,
    Propose,
    StageInfo,
)
from node.net.membership import until_answered
from node.train.anchor_files import AnchorFiles
from node.train.attestations import Attestations
from node.train.cancellation import run_to_the_end
from node.train.commits import Commits, Proposal
from node.train.embedding_snapshots import EmbeddingSnapshots
from node.train.round_payloads import RoundPayloads
from node.train.services import Services
from protocol.algorithm.turns import is_due
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.fixed import LEAST_SHARE, OUTAGE_SECONDS
from protocol.status import PayloadAgreement, Wait
from protocol.types import Decision, ExchangeGroup, Part, PayloadDescriptor, Plan, Rollback, StageRange

log = logging.getLogger(__name__)
T = TypeVar("T")

_ANSWER_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_EARLY_SECONDS, _LONGEST_PAUSE = 0.2, 10.0
_ATTESTED_ROUNDS = 2  # the older anchors than this need no attestation


@dataclass(frozen=True)
class RoundOutcome:
    """The result of a round on this member: the epoch of the next round's plan, bytes of own payloads.

    For the other fields see protocol.status.Measurement.
    """

    next_epoch: int
    payload_bytes: int
    progress_norm: float = 0.0
    error_norm: float = 0.0
    agreements: tuple[PayloadAgreement, ...] = ()


class Overlap:
    """The overlap of one round's exchange on this member with inner steps of the next round.

    Attributes:
        proposed: set once each of `stages` has its payload, or has none in this round. Only then may the
            training change the parameters from which payloads are made.
        trained: set once the overlapping steps are over. Only then may a decision be applied.
    """

    def __init__(self, stages: Iterable[int]) -> None:
        self._unproposed = set(stages)
        self.proposed, self.trained = asyncio.Event(), asyncio.Event()

    def mark_proposed(self, stage: int) -> None:
        self._unproposed.discard(stage)
        if not self._unproposed:
            self.proposed.set()


class OuterExchange:
    """Brings the anchors of one member from round to round.

    On any error nothing was applied to the stage concerned, and the same round may be tried again.

    Args:
        folder: of this node's checkpoints.

    Attributes:
        stages: those for which this member proposes.
        anchor_files: where it gets anchors of other rounds.
        parts: what this member holds: its stages, and the embedding if it follows that without stage 0.
        between_steps: a lock to hold while parameters change, and while an inner step computes.
        attestations: of what this member holds, after each decision that it applies.
        snapshots: of the embedding, where links use them.
    """

    def __init__(self, services: Services, stages: StageRange, stage_info: StageInfo, folder: Path) -> None:
        self.anchor_files = AnchorFiles(services, stage_info, folder)
        self.stages, self.stage_info, self.parts = stages, stage_info, list(stage_info.parts)
        self.between_steps = asyncio.Lock()
        self._spec, self._peer, self._worker = services.spec, services.identity.peer, services.worker
        self._transport, self._coordinator = services.transport, services.coordinator
        self._membership, self._waits = services.membership, services.figures.waits
        self._payloads = RoundPayloads(services, stage_info)
        # Round and digest of each anchor; of the embedding also where it is a part of the hosted stage 0.
        self._anchors: dict[tuple[int, Part], tuple[int, str]] = {}
        self._commits = Commits(services)
        self.attestations = Attestations(self._attest, self._peers)
        self.snapshots: EmbeddingSnapshots | None = None
        if self._spec.link.embedding_every:
            self.snapshots = EmbeddingSnapshots(services, stages, self.anchor_files, folder)

    @property
    def position(self) -> int:
        """The last round that is applied to everything that this member holds."""
        return min(self.round_of(stage, part) for stage, part in self.parts)

    @property
    def is_even(self) -> bool:
        """Whether everything that this member holds is after the same round."""
        return len({self.round_of(stage, part) for stage, part in self.parts}) == 1

    def round_of(self, stage: int, part: Part) -> int:
        """The last round that is applied to this part."""
        return self._anchors[stage, part][0]

    async def refresh(self) -> None:
        """Ask the worker which anchors it has. Call this after it has loaded any."""
        self._anchors = dict(await self._worker.call(Digests()))
        self._commits.pending.clear()  # loading an anchor drops its proposal
        self.attestations.drop()

    async def contribute(
        self, plan: Plan, round_number: int, share: float, overlap: Overlap | None = None
    ) -> RoundOutcome:
        """Propose payloads for a round, and apply its decisions to everything that this member holds.

        `share` is the part of the inner phase that this replica has done, above 0; it scales the weight.
        Before that the coordinator has heard of the anchors of the round before.

        Raises HetnodeError: UNKNOWN_PEER, ROUND_IN_DOUBT, PAYLOAD_UNAVAILABLE, ANCHOR_DIVERGED, ...
        """
        await self.attestations.told()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._contribute_stage(plan, stage, round_number, share, overlap))
                for stage in self.stages
            ]
            if (0, Part.EMBEDDING) in self.parts:
                group.create_task(self._follow_part(0, Part.EMBEDDING, round_number, overlap=overlap))
        decisions, nbytes = zip(*(task.result() for task in tasks), strict=True)
        results = self._commits.measured_in(round_number)
        return RoundOutcome(
            decisions[0].next_epoch,
            payload_bytes=sum(nbytes),
            progress_norm=math.hypot(*(result.progress_norm for result, _ in results)),
            error_norm=math.hypot(*(result.error_norm for result, _ in results)),
            agreements=tuple(agreement for _, agreement in results if agreement is not None),
        )

    async def follow(self, round_number: int) -> None:
        """Apply the decisions of a round to everything that this member holds, without a contribution.

        Raises HetnodeError as :meth:`contribute`.
        """
        async with asyncio.TaskGroup() as group:
            for stage, part in self.parts:
                if self.round_of(stage, part) < round_number:
                    group.create_task(self._follow_part(stage, part, round_number))
        await self.attestations.told()

    async def restore(self, rollback: Rollback) -> None:
        """Bring everything that this member holds, and that is before a rollback, to the round after it.

        Raises HetnodeError as :meth:`contribute`, and STATE_UNAVAILABLE.
        """
        async with asyncio.TaskGroup() as group:
            for stage, part in self.parts:
                if self.round_of(stage, part) < rollback.round_number:
                    group.create_task(self._restore(stage, part, rollback, None))
        await self.attestations.told()

    async def prepare_links(self, round_number: int) -> None:
        """Give the worker what its links derive T_perp from in a round, before the inner phase begins."""
        if self.snapshots is not None:
            with self._waits.on(Wait.CHECKPOINT):
                await self.snapshots.use(round_number)
            self.snapshots.fetch_for(round_number)

    async def attest_all(self) -> None:
        """Tell the coordinator the digests of everything that this member holds.

        Raises HetnodeError: ANCHOR_DIVERGED where other replicas have another anchor.
        """
        for stage, part in list(self._anchors):
            await self._attest(stage, part)
        if self.snapshots is not None:
            has_stage_0 = (0, Part.STAGE) in self._anchors
            await self.snapshots.tell_held(self.round_of(0, Part.STAGE) if has_stage_0 else self.position)

    async def decision(self, stage: int, round_number: int, withheld: int = 0) -> Decision:
        """Wait for the decision on (stage, round) without a time limit while the coordinator is there.

        `withheld` is the epoch under which this node has no payload for the round, so that the coordinator
        does not wait for one; 0 where it contributes or has no assignment.
        """
        deadline = self._spec.timing.match_window + _ANSWER_SECONDS
        return await self._retry_while_away(
            lambda: self._coordinator.await_decision(stage, round_number, deadline, withheld)
        )

    async def _contribute_stage(
        self, plan: Plan, stage: int, round_number: int, share: float, overlap: Overlap | None
    ) -> tuple[Decision, int]:
        """One stage's transaction: propose, match, exchange, check, report, apply."""
        if not is_due(self._spec, stage, round_number):
            if overlap is not None:
                overlap.mark_proposed(stage)
            return await self._follow_part(stage, Part.STAGE, round_number, overlap=overlap), 0
        payload = await self._propose(stage, round_number, share)
        if overlap is not None:
            overlap.mark_proposed(stage)
        if payload is None:
            return await self._follow_part(stage, Part.STAGE, round_number, plan.epoch, overlap), 0
        anchor_digest = self._anchors[stage, Part.STAGE][1]
        own = self._payloads.describe(plan, stage, round_number, share, anchor_digest, payload)
        self._commits.pending[stage] = Proposal(own)
        with self._waits.on(Wait.GROUP):
            group = await self._match(own)
        self._commits.pending[stage] = Proposal.in_group(own, group)
        seconds = (group.seconds if group else 0.0) or self._spec.timing.fetch
        with self._waits.on(Wait.PAYLOADS):
            gathered = await self._transport.exchange(
                payload, own, group, expected=len(plan.replicas), deadline=seconds
            )
        valid, rejected = await self._payloads.check(plan, own, payload, gathered.held)
        held = [descriptor for descriptor in gathered.held if descriptor in valid]
        all_rejected = sorted((*gathered.rejected, *rejected), key=lambda each: each.descriptor.owner)
        deadline = self._spec.timing.decide + _ANSWER_SECONDS
        with self._waits.on(Wait.DECISION):
            decision = await self._retry_while_away(
                lambda: self._coordinator.report(
                    stage, round_number, held, all_rejected, deadline, gathered.claim
                )
            )
        await self._apply(decision, Part.STAGE, valid, overlap)
        return decision, len(payload)

    async def _propose(self, stage: int, round_number: int, share: float) -> bytes | None:
        """The payload of `stage`; None where the replica has trained too little, is late or has diverged."""
        if share < LEAST_SHARE or self._membership.run_view.round_number > round_number:
            log.warning("round %d closed without this node: its progress counts in a later one", round_number)
            return None
        async with self.between_steps:
            payload = await self._worker.call(Propose(stage))
        if payload is None:
            log.warning("stage %d has non-finite values: it restarts from the anchor, nothing is sent", stage)
        return payload

    async def _match(self, own: PayloadDescriptor) -> ExchangeGroup | None:
        """The coordinator's group; None where it is away, so that the transport finds a group."""
        deadline, pause = self._spec.timing.match_window + _ANSWER_SECONDS, _EARLY_SECONDS
        while True:
            try:
                return await self._coordinator.match(own, deadline)
            except HetnodeError as error:
                if error.code is ErrorCode.OFFER_TOO_EARLY:
                    log.info("%s", error)
                elif error.code is ErrorCode.COORDINATOR_UNREACHABLE:
                    where = f"round {own.round_number} of stage {own.stage}"
                    log.warning("matching %s through the DHT: %s", where, error)
                    return None
                else:
                    raise
            # This machine has become much faster than it was: the coordinator soon believes it.
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _attest(self, stage: int, part: Part) -> None:
        round_number, digest = self._anchors[stage, part]
        await self._retry_while_away(lambda: self._coordinator.attest(stage, round_number, part, digest))

    async def _retry_while_away(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent call to the coordinator while the coordinator is away.

        Raises HetnodeError: ROUND_IN_DOUBT after OUTAGE_SECONDS; nothing was applied meanwhile.
        """

        def check_outage(_: HetnodeError) -> None:
            away = self._membership.away
            if self._membership.run_view.finished:
                raise run_is_over() from None
            if away > OUTAGE_SECONDS:
                raise HetnodeError(
                    ErrorCode.ROUND_IN_DOUBT,
                    f"The coordinator has not answered for {away:.0f} s, so the round cannot be settled.",
                    "Nothing was applied that it did not commit. Ask the operator, and join again.",
                ) from None

        return await until_answered(call, _RETRY_SECONDS, check_outage)

    async def _follow_part(
        self, stage: int, part: Part, round_number: int, withheld: int = 0, overlap: Overlap | None = None
    ) -> Decision:
        """Apply the decision of a round to one part without a contribution."""
        decision = await self.decision(stage, round_number, withheld)
        await self._apply(decision, part, {}, overlap)
        return decision

    async def _apply(
        self,
        decision: Decision,
        part: Part,
        known: Mapping[PayloadDescriptor, bytes],
        overlap: Overlap | None,
    ) -> None:
        """Apply the next decision to one part when `overlap` is over; the result is attested soon.

        `known` are payloads that were gathered in the exchange.
        """
        stage, round_number = decision.stage, decision.round_number
        if decision.restore_round is not None:
            await self._restore(stage, part, Rollback(round_number, decision.restore_round), overlap)
            return
        with self._waits.on(Wait.PAYLOADS):
            outcome = await self._payloads.collect(decision, known)
        if overlap is not None:
            await overlap.trained.wait()
        # Never cancelled halfway: the worker and this object must agree on which rounds are applied.
        await run_to_the_end(self._apply_once(decision, part, outcome))
        result = decision.result.sha256 if decision.result else None
        await self._end_round(part, RoundEnd(stage, round_number, result))
        self._attest_if_recent(stage, part, round_number)

    async def _end_round(self, part: Part, ended: RoundEnd) -> None:
        """Let the transport settle what it has reduced of a hosted stage."""
        if self._spec.outer.exchange == "reduced" and part is Part.STAGE:
            await self._transport.end_round(ended)

    def _attest_if_recent(self, stage: int, part: Part, round_number: int) -> None:
        if round_number >= self._membership.run_view.round_number - _ATTESTED_ROUNDS:
            for changed in self._parts_changed_with(stage, part):
                self.attestations.add(stage, changed)

    def _peers(self) -> int:
        plan = self._membership.run_view.newest
        return plan.size if plan else 0

    async def _restore(self, stage: int, part: Part, rollback: Rollback, overlap: Overlap | None) -> None:
        """Load the restored anchor of one part when `overlap` is over; it is attested soon."""
        file: Path | None = None
        if rollback.restore_round:  # every worker makes the initial parameters itself
            wanted = stage, part, rollback.restore_round
            file = await self._retry_while_away(lambda: self.anchor_files.of_round(*wanted))
        if overlap is not None:
            await overlap.trained.wait()
        await run_to_the_end(self._restore_once(stage, part, rollback, file))
        await self._end_round(part, RoundEnd(stage, rollback.round_number, rolled_back=True))
        self._attest_if_recent(stage, part, rollback.round_number)

    async def _restore_once(self, stage: int, part: Part, rollback: Rollback, file: Path | None) -> None:
        async with self.between_steps:
            if self.round_of(stage, part) < rollback.round_number:
                log.warning(
                    "round %d: %s %d goes back to round %d",
                    *(rollback.round_number, part.value, stage, rollback.restore_round),
                )
                await self._worker.call(
                    LoadInitialPart(stage, part, rollback.round_number)
                    if file is None
                    else LoadPart(stage, part, rollback.round_number, file)
                )
                self._commits.pending.pop(stage, None)
                now = await self._worker.call(Digests())
                for changed in self._parts_changed_with(stage, part):
                    self._anchors[stage, changed] = now[stage, changed]
                if self.snapshots is not None:
                    self.snapshots.note_rollback(rollback.round_number)
                    if stage == 0:
                        await self.snapshots.write(rollback.round_number)
        if file is not None:
            await asyncio.to_thread(self.anchor_files.remove, file)

    async def _apply_once(self, decision: Decision, part: Part, outcome: Sequence[bytes]) -> None:
        """Apply a decision to one part, unless this was done already."""
        stage, round_number = decision.stage, decision.round_number
        async with self.between_steps:
            done = self.round_of(stage, part)
            if done >= round_number:
                return
            assert done == round_number - 1, "decisions are applied in their order"
            apply = self._commits.to_embedding if part is Part.EMBEDDING else self._apply_to_stage
            for changed, digest in (await apply(decision, outcome)).items():
                self._anchors[stage, changed] = (round_number, digest)
            if self.snapshots is not None and stage == 0:
                await self.snapshots.write(round_number)

    async def _apply_to_stage(self, decision: Decision, outcome: Sequence[bytes]) -> dict[Part, str]:
        """Commit or abort at the worker. Returns the new digests; stage 0 contains the embedding."""
        stage = decision.stage
        if decision.committed:
            return await self._commits.to_stage(decision, outcome)
        await self._commits.abort(decision)
        return {part: self._anchors[stage, part][1] for part in self._parts_changed_with(stage, Part.STAGE)}

    def _parts_changed_with(self, stage: int, part: Part) -> list[Part]:
        """The parts that change when a decision is applied to `part`: stage 0 contains the embedding."""
        changed = (Part.STAGE, Part.EMBEDDING) if (stage, part) == (0, Part.STAGE) else (part,)
        return [each for each in changed if (stage, each) in self._anchors]


def run_is_over() -> HetnodeError:
    return HetnodeError(
        ErrorCode.RUN_STARTED,
        "The run has finished, and this node had not caught up with it.",
        "The nodes that took part in its last round have the model.",
    )
