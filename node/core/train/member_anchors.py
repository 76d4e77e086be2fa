"""The anchors of one member, from round to round: applies what the coordinator has decided.

The decisions of the coordinator are a log, and every anchor is the result of the decisions up to some round.
A member that joined late, came back or was cut off applies the decisions that it has missed, one after the
other. A member that does not host stage 0 also applies those on stage 0 to its copy of the embedding.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from node.core.train.anchor_files import AnchorFiles
from node.core.train.commits import Commits
from node.core.train.link_snapshots import LinkSnapshots, MakeSnapshots
from node.core.train.round_gates import RoundGates
from node.core.train.round_payloads import RoundPayloads
from node.core.train.services import Services
from node.exchange.transport import RoundEnd
from node.ipc.stored_payload import StoredPayload
from node.ipc.worker_calls import Digests, LoadInitialPart, LoadPart, StageInfo
from node.net.attestations import Attestations
from node.net.cancellation import run_to_the_end
from node.net.membership import RunView, until_answered
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.fixed import OUTAGE_SECONDS
from protocol.status import Wait
from protocol.types import (
    Aborted,
    Committed,
    Decision,
    Part,
    PayloadDescriptor,
    PeerId,
    ReservedAssignment,
    Rollback,
    RolledBack,
    Skipped,
    StageRange,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_SECONDS = 10.0
"""For an answer of the coordinator, beyond the time that it may wait for others."""
_RETRY_SECONDS = 1.0
_ATTESTED_ROUNDS = 2  # the older anchors than this need no attestation


class MemberAnchors:
    """What one member holds of the model, and the round that each part is after.

    On any error nothing was applied to the stage concerned, and the same round may be tried again.

    Args:
        folder: of this node's checkpoints.

    Attributes:
        stages: those that this member hosts.
        parts: what this member holds: its stages, and the embedding if it follows that without stage 0.
        files: where it gets anchors of other rounds.
        payloads, commits: what it applies, and the worker that applies it.
        between_steps: a lock to hold while parameters change, and while an inner step computes.
        attestations: of what this member holds, after each decision that it applies.
        snapshots: of the embedding, where links use them.
    """

    def __init__(
        self,
        services: Services,
        stages: StageRange,
        stage_info: StageInfo,
        folder: Path,
        make_snapshots: MakeSnapshots,
    ) -> None:
        self.stages, self.stage_info, self.parts = stages, stage_info, list(stage_info.parts)
        self.files = AnchorFiles(services, stage_info, folder)
        self.payloads, self.commits = RoundPayloads(services, stage_info), Commits(services)
        self.between_steps = asyncio.Lock()
        self.attestations = Attestations(self._attest, self._peers)
        self.snapshots: LinkSnapshots | None = None
        if services.spec.link.embedding_every:
            self.snapshots = make_snapshots(services, stages, self.files, folder)
        self._spec, self._worker, self._transport = services.spec, services.worker, services.transport
        self._coordinator, self._membership = services.coordinator, services.membership
        self._waits = services.figures.waits
        # Round and digest of each anchor; of the embedding also where it is a part of the hosted stage 0.
        self._anchors: dict[tuple[int, Part], tuple[int, str]] = {}
        # The same of the two newest ones before it that checkpoints have, and of the one just before it.
        self._earlier: dict[tuple[int, Part], list[tuple[int, str]]] = {}

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

    def digest_of(self, stage: int) -> str:
        """The digest of the anchor of a hosted stage."""
        return self._anchors[stage, Part.STAGE][1]

    async def refresh(self) -> None:
        """Ask the worker which anchors it has. Call this after it has loaded any."""
        self._anchors = dict(await self._worker.call(Digests()))
        self._earlier.clear()
        self.commits.pending.clear()  # loading an anchor drops its proposal
        self.attestations.drop()

    async def follow(self, round_number: int) -> None:
        """Apply the decisions of a round to everything that this member holds, without a contribution.

        Ends when the plan of the next round is known, which has its settings.

        Raises HetnodeError: UNKNOWN_PEER, ROUND_IN_DOUBT, PAYLOAD_UNAVAILABLE, ANCHOR_DIVERGED, ...
        """
        async with asyncio.TaskGroup() as group:
            following = [
                group.create_task(self.follow_part(stage, part, round_number))
                for stage, part in self.parts
                if self.round_of(stage, part) < round_number
            ]
        await self.attestations.told()
        epoch = max((each.result().next_epoch for each in following), default=0)
        await self._membership.until(lambda run_view: run_view.epoch >= epoch or None)

    async def follow_part(
        self, stage: int, part: Part, round_number: int, epoch: int = 0, gates: RoundGates | None = None
    ) -> Decision:
        """Apply the decision of a round to one part without a contribution."""
        decision = await self.decision(stage, round_number, epoch)
        await self.apply(decision, part, {}, gates)
        return decision

    async def restore(self, rollback: Rollback) -> None:
        """Bring everything that this member holds, and that is before a rollback, to the round after it.

        Raises HetnodeError as :meth:`follow`, and STATE_UNAVAILABLE.
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

        Raises HetnodeError: ANCHOR_DIVERGED where other replicas have another anchor; COORDINATOR_BEHIND,
        after all is told, also of rounds before: members may have stopped one round apart, and the stages of
        one member, too. Then all have the same rounds on their disks alone.
        """
        behind: HetnodeError | None = None
        for where, anchor in list(self._anchors.items()):
            try:
                await self._tell(*where, *anchor)
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_BEHIND:
                    raise
                behind = error
                for earlier in self._earlier.get(where, ()):
                    with suppress(HetnodeError):  # it raises the same, and what is told counts
                        await self._tell(*where, *earlier)
        if behind is not None:
            raise behind
        if self.snapshots is not None:
            has_stage_0 = (0, Part.STAGE) in self._anchors
            await self.snapshots.tell_held(self.round_of(0, Part.STAGE) if has_stage_0 else self.position)

    async def decision(self, stage: int, round_number: int, epoch: int = 0) -> Decision:
        """Wait for the decision on (stage, round) without a time limit while the coordinator is there.

        `epoch` is that under which this node has no payload for the round, so that the coordinator
        does not wait for one; 0 where it contributes or has no assignment.
        """
        deadline = self._spec.timing.match_window + ANSWER_SECONDS
        return await self.while_away(
            lambda: self._coordinator.await_decision(stage, round_number, deadline, epoch)
        )

    async def while_away(self, call: Callable[[], Awaitable[T]]) -> T:
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

    async def apply(
        self,
        decision: Decision,
        part: Part,
        known: Mapping[PayloadDescriptor, StoredPayload],
        gates: RoundGates | None,
    ) -> None:
        """Apply the next decision to one part when overlapping steps are over; the result is attested soon.

        `known` are payloads that were gathered in the exchange.
        """
        stage, round_number = decision.stage, decision.round_number
        if isinstance(decision, RolledBack):
            await self._restore(stage, part, Rollback(round_number, decision.restore_round), gates)
            return
        outcome, result = list[StoredPayload](), None
        if isinstance(decision, Committed):
            with self._waits.on(Wait.PAYLOADS):
                outcome = await self.payloads.collect(decision, known)
            result = decision.result.sha256 if decision.result else None
        if gates is not None:
            await gates.trained.wait()
        # Never cancelled halfway: worker, transport and this object must agree on which rounds are applied.
        applying = self._apply_once(decision, part, outcome, known)
        await run_to_the_end(self._with_end(applying, part, RoundEnd(stage, round_number, result)))
        self._attest_if_recent(stage, part, round_number)

    async def _apply_once(
        self,
        decision: Committed | Aborted | Skipped,
        part: Part,
        outcome: Sequence[StoredPayload],
        known: Mapping[PayloadDescriptor, StoredPayload],
    ) -> None:
        """Apply a decision to one part, unless this was done already."""
        stage, round_number = decision.stage, decision.round_number
        async with self.between_steps:
            done = self.round_of(stage, part)
            if done >= round_number:
                return
            assert done == round_number - 1, "decisions are applied in their order"
            if part is Part.EMBEDDING:
                digests = await self.commits.to_embedding(decision, outcome)
            elif isinstance(decision, Committed):
                digests = await self.commits.to_stage(decision, outcome, known)
            else:
                await self.commits.abort(decision)
                changed = self._parts_changed_with(stage, Part.STAGE)
                digests = {each: self._anchors[stage, each][1] for each in changed}
            for each, digest in digests.items():
                former = self._anchors[stage, each]
                every = self._spec.recovery.checkpoint_every
                saved = [one for one in self._earlier.get((stage, each), ()) if one[0] % every == 0]
                self._earlier[stage, each] = [*saved[-2:], former]
                self._anchors[stage, each] = (round_number, digest)
            if self.snapshots is not None and stage == 0:
                await self.snapshots.write(round_number)

    async def _restore(self, stage: int, part: Part, rollback: Rollback, gates: RoundGates | None) -> None:
        """Load the restored anchor of one part when overlapping steps are over; it is attested soon.

        Where no peer gives it and it is here, as after a restart of the coordinator from an older copy, it
        stays, and so does all that was learned since.
        """
        file: Path | None = None
        kept = range(0)
        if rollback.restore_round:  # every worker makes the initial parameters itself
            wanted = stage, part, rollback.restore_round
            try:
                file = await self.while_away(lambda: self.files.of_round(*wanted))
            except HetnodeError as error:
                is_here = self.round_of(stage, part) == rollback.restore_round
                if not is_here or error.code is not ErrorCode.STATE_UNAVAILABLE:
                    raise
                kept = range(rollback.restore_round + 1, rollback.round_number + 1)
        if gates is not None:
            await gates.trained.wait()
        if self.snapshots is not None:
            self.snapshots.note_rollback(rollback.round_number)
        for each in kept:
            unchanged = Aborted(stage, each, 0, f"the anchor after round {rollback.restore_round} stays")
            await run_to_the_end(self._apply_once(unchanged, part, (), {}))
        ended = RoundEnd(stage, rollback.round_number, rolled_back=True)
        await run_to_the_end(self._with_end(self._restore_once(stage, part, rollback, file), part, ended))
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
                self.commits.pending.pop(stage, None)
                self._earlier.clear()
                now = await self._worker.call(Digests())
                for changed in self._parts_changed_with(stage, part):
                    self._anchors[stage, changed] = now[stage, changed]
                if self.snapshots is not None and stage == 0:
                    await self.snapshots.write(rollback.round_number)
        if file is not None:
            await asyncio.to_thread(self.files.remove, file)

    async def _with_end(self, applying: Awaitable[None], part: Part, ended: RoundEnd) -> None:
        """Apply a round, and let the transport settle what it keeps of a round of a hosted stage."""
        await applying
        if part is Part.STAGE:
            await self._transport.end_round(ended)

    async def _attest(self, stage: int, part: Part) -> None:
        await self._tell(stage, part, *self._anchors[stage, part])

    async def _tell(self, stage: int, part: Part, round_number: int, digest: str) -> None:
        await self.while_away(lambda: self._coordinator.attest(stage, round_number, part, digest))

    def _attest_if_recent(self, stage: int, part: Part, round_number: int) -> None:
        if round_number >= self._membership.run_view.round_number - _ATTESTED_ROUNDS:
            for changed in self._parts_changed_with(stage, part):
                self.attestations.add(stage, changed)

    def _parts_changed_with(self, stage: int, part: Part) -> list[Part]:
        """The parts that change when a decision is applied to `part`: stage 0 contains the embedding."""
        changed = (Part.STAGE, Part.EMBEDDING) if (stage, part) == (0, Part.STAGE) else (part,)
        return [each for each in changed if (stage, each) in self._anchors]

    def _peers(self) -> int:
        plan = self._membership.run_view.newest
        return plan.size if plan else 0


def run_is_over() -> HetnodeError:
    return HetnodeError(
        ErrorCode.RUN_STARTED,
        "The run has finished, and this node had not caught up with it.",
        "The nodes that took part in its last round have the model.",
    )


def reservation_in(run_view: RunView, peer: PeerId) -> ReservedAssignment | None:
    """What is reserved for `peer`, once something is. Raises RUN_STARTED where the run is over before."""
    if run_view.finished:
        raise run_is_over()
    return run_view.reservation_of(peer)
