"""The outer rounds of one member: offer, gather, report, and apply exactly what the coordinator committed.

The coordinator's decisions are a log, and this member's anchors are always those after some round of it. A
contributor offers a payload before it applies a decision; who came late, came back or was cut off applies the
decisions that it has missed in the same way, one after the other. All stages at the same time, each a
transaction of its own; a member that does not host stage 0 also follows stage 0's decisions, because the
committed embedding must reach every member of every replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from node.ipc.worker_calls import (
    Abort,
    Commit,
    CommitEmbedding,
    Digests,
    Propose,
    ResetError,
    Screen,
    StageInfo,
)
from node.ipc.worker_client import WorkerClient
from node.net.coordinator_client import CoordinatorClient
from node.net.membership import Membership, jittered
from node.security.identity import Identity
from node.train.overlap import Overlap
from node.transport.payload_exchange import own_order
from node.transport.transport import Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.envelope import is_authentic, sign_descriptor
from protocol.types import (
    Decision,
    ExchangeGroup,
    ManifestEntry,
    Part,
    PayloadDescriptor,
    PeerId,
    Plan,
    Rejection,
    StageRange,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_ANSWER_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_LOCAL_SECONDS = 10.0


@dataclass(frozen=True)
class RoundOutcome:
    """What became of one round on this member."""

    next_epoch: int
    payload_bytes: int


class OuterExchange:
    """Brings the anchors of one member from round to round.

    On any error nothing was applied to the stage concerned, and the same round may be settled again.

    Args:
        between_steps: held while parameters change, and by others while an inner step computes.
    """

    def __init__(
        self,
        spec: RunSpec,
        stages: StageRange,
        identity: Identity,
        worker: WorkerClient,
        transport: Transport,
        coordinator: CoordinatorClient,
        membership: Membership,
        stage_info: StageInfo,
        between_steps: asyncio.Lock,
    ) -> None:
        self._spec, self._stages, self._identity = spec, stages, identity
        self._worker, self._transport, self._coordinator = worker, transport, coordinator
        self._membership, self._stage_info, self._between_steps = membership, stage_info, between_steps
        # Round and digest of each anchor; of the embedding as well where it is a part of stage 0.
        self._anchors: dict[tuple[int, Part], tuple[int, str]] = {}
        self._pending: dict[int, PayloadDescriptor] = {}

    @property
    def stages(self) -> StageRange:
        """Those that this member proposes for."""
        return self._stages

    @property
    def position(self) -> int:
        """The last round that is applied to everything that this member holds."""
        return min(self.round_of(stage, part) for stage, part in self.parts)

    @property
    def is_even(self) -> bool:
        """Whether all that this member holds is after the same round."""
        return len({self.round_of(stage, part) for stage, part in self.parts}) == 1

    @property
    def parts(self) -> list[tuple[int, Part]]:
        """What this member holds: its stages, and the embedding of stage 0 where it does not host that."""
        return list(self._stage_info.parts)

    def round_of(self, stage: int, part: Part) -> int:
        """The last round that is applied to this part."""
        return self._anchors[stage, part][0]

    async def refresh(self) -> None:
        """Learn from the worker what its anchors are; to be called after it has loaded any."""
        self._anchors = dict(await self._worker.call(Digests()))
        self._pending.clear()  # loading drops proposals

    async def contribute(
        self, plan: Plan, round_number: int, share: float, overlap: Overlap | None = None
    ) -> RoundOutcome:
        """Offer what was learned to round `round_`, and bring all that this member holds to its decision.

        Args:
            share: of the inner phase that this replica has done, above 0. The payloads weigh so much.
            overlap: told when every stage has proposed. Nothing is applied before its training is over,
                however early the decision.

        Raises HetnodeError: UNKNOWN_PEER, ROUND_IN_DOUBT, PAYLOAD_UNAVAILABLE, ANCHOR_DIVERGED, ...
        """
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._contribute(plan, stage, round_number, share, overlap))
                for stage in self._stages
            ]
            if (0, Part.EMBEDDING) in self.parts:
                group.create_task(self._settle(0, Part.EMBEDDING, round_number, overlap=overlap))
        outcomes = [task.result() for task in tasks]
        return RoundOutcome(
            next_epoch=outcomes[0][0].next_epoch,
            payload_bytes=sum(nbytes for _, nbytes in outcomes),
        )

    async def follow(self, round_number: int) -> None:
        """Bring all that this member holds to the decision of `round_` without a contribution.

        Raises HetnodeError as :meth:`contribute`.
        """
        async with asyncio.TaskGroup() as group:
            for stage, part in self.parts:
                if self._anchors[stage, part][0] < round_number:
                    group.create_task(self._settle(stage, part, round_number))

    async def attest_all(self) -> None:
        """Tell the coordinator what this member holds.

        Raises HetnodeError: ANCHOR_DIVERGED where the others hold something else.
        """
        for (stage, part), (round_number, digest) in list(self._anchors.items()):
            await self._attest(stage, round_number, part, digest)

    async def decision(self, stage: int, round_number: int, withheld: int = 0) -> Decision:
        """The decision of (stage, round), however long that takes while the coordinator is there.

        Args:
            withheld: the epoch under which this node has nothing to offer for it, so that nobody waits.
        """
        deadline = self._spec.timing.match_window + _ANSWER_SECONDS
        return await self._patiently(
            lambda: self._coordinator.await_decision(stage, round_number, deadline, withheld)
        )

    async def _contribute(
        self, plan: Plan, stage: int, round_number: int, share: float, overlap: Overlap | None
    ) -> tuple[Decision, int]:
        payload = await self._propose(stage, round_number, share)
        if overlap is not None:
            overlap.has_proposed(stage)
        if payload is None:
            return await self._settle(stage, Part.STAGE, round_number, plan.epoch, overlap), 0
        mine = self._describe(plan, stage, round_number, share, payload)
        self._pending[stage] = mine
        group = await self._match(mine)
        gathered = await self._transport.exchange(
            payload,
            mine,
            group,
            expected=len(plan.replicas),
            deadline=(group.seconds if group else 0.0) or self._spec.timing.fetch,
        )
        known, rejected = await self._screen(plan, mine, payload, gathered.held)
        held = [descriptor for descriptor in gathered.held if descriptor in known]
        refused = sorted((*gathered.rejected, *rejected), key=lambda each: each.descriptor.owner)
        seconds = self._spec.timing.decide + _ANSWER_SECONDS
        decision = await self._patiently(
            lambda: self._coordinator.report(stage, round_number, held, refused, seconds)
        )
        await self._apply(decision, Part.STAGE, known, overlap)
        return decision, len(payload)

    async def _propose(self, stage: int, round_number: int, share: float) -> bytes | None:
        """The payload of `stage`; None where there is nothing to offer, or too late."""
        if share < self._spec.recovery.least_share or self._membership.run_view.round_number > round_number:
            log.warning(
                "round %d closed without this node: what it learned will count in the next", round_number
            )
            return None
        async with self._between_steps:
            payload = await self._worker.call(Propose(stage))
        if payload is None:
            log.warning(
                "stage %d diverged to non-finite values: restarted from the anchor, nothing sent", stage
            )
        return payload

    def _describe(
        self, plan: Plan, stage: int, round_number: int, share: float, payload: bytes
    ) -> PayloadDescriptor:
        replica = plan.replica_of(self._identity.peer)
        assert replica is not None, "this node trains under a plan that gives it a place"
        descriptor = PayloadDescriptor(
            run=self._spec.run_id,
            stage=stage,
            round_number=round_number,
            owner=self._identity.peer,
            anchor_digest=self._anchors[stage, Part.STAGE][1],
            codec=self._stage_info.codecs[stage],
            weight=replica.weight * share,
            nbytes=len(payload),
            sha256=hashlib.sha256(payload).hexdigest(),
        )
        return sign_descriptor(descriptor, self._identity.sign)

    async def _screen(
        self, plan: Plan, mine: PayloadDescriptor, payload: bytes, held: Sequence[PayloadDescriptor]
    ) -> tuple[dict[PayloadDescriptor, bytes], list[Rejection]]:
        """What was gathered, in two parts: what may count, with its bytes, and what must not."""
        known, rejected = {mine: payload}, []
        for descriptor in held:
            problem = self._problem(plan, descriptor)
            if descriptor == mine:
                continue
            if problem:
                rejected.append(Rejection(descriptor, problem))
            else:
                entry = ManifestEntry(descriptor, (self._identity.peer,))  # it is here already
                known[descriptor] = await self._transport.fetch_payload(entry, _LOCAL_SECONDS)
        problems = await self._worker.call(Screen(mine.stage, tuple(known.values())))
        for descriptor, problem in zip(list(known), problems, strict=True):
            if problem and descriptor != mine:
                del known[descriptor]
                rejected.append(Rejection(descriptor, problem))
        for rejection in rejected:
            where, owner = f"stage {mine.stage}, round {mine.round_number}", rejection.descriptor.owner
            log.warning("%s: refused the payload of %s: %s", where, owner, rejection.reason)
        return known, rejected

    def _problem(self, plan: Plan, descriptor: PayloadDescriptor) -> str:
        """Why a payload must not count, whatever its bytes are; "" where nothing speaks against it."""
        replica = plan.replica_of(descriptor.owner)
        if replica is None or replica.host_of(descriptor.stage).peer != descriptor.owner:
            return f"its owner does not host stage {descriptor.stage} in plan {plan.epoch}"
        if descriptor.weight > replica.weight:
            return f"its weight is {descriptor.weight}, the plan gives it {replica.weight}"
        expected = self._stage_info.payload_bytes[descriptor.stage]
        if descriptor.nbytes != expected:
            return f"it has {descriptor.nbytes} bytes, every payload of this stage has {expected}"
        return ""

    async def _match(self, mine: PayloadDescriptor) -> ExchangeGroup | None:
        """The coordinator's group; None where it is away, so that the transport finds one."""
        try:
            return await self._coordinator.match(mine, self._spec.timing.match_window + _ANSWER_SECONDS)
        except HetnodeError as error:
            if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                raise
            log.warning(
                "matching round %d of stage %d through the DHT: %s", mine.round_number, mine.stage, error
            )
            return None

    async def _attest(self, stage: int, round_number: int, part: Part, digest: str) -> None:
        await self._patiently(lambda: self._coordinator.attest(stage, round_number, part.value, digest))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call, which the coordinator may safely hear twice, while the coordinator is away.

        Raises HetnodeError: ROUND_IN_DOUBT after ``timing.outage`` seconds; nothing was guessed meanwhile.
        """
        while True:
            try:
                return await call()
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                away = self._membership.away
                if self._membership.run_view.finished:
                    raise run_is_over() from None
                if away > self._spec.timing.outage:
                    raise HetnodeError(
                        ErrorCode.ROUND_IN_DOUBT,
                        f"The coordinator has not answered for {away:.0f} s, so the round cannot be settled.",
                        "Nothing was applied that it did not commit. Ask the operator, and join again.",
                    ) from None
            await asyncio.sleep(jittered(_RETRY_SECONDS))

    async def _settle(
        self, stage: int, part: Part, round_number: int, withheld: int = 0, overlap: Overlap | None = None
    ) -> Decision:
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
        """Bring one anchor to `decision`, the next one, as soon as `overlap` is over, and attest it."""
        stage, round_number = decision.stage, decision.round_number
        payloads = await self._collect(decision, known)
        if overlap is not None:
            await overlap.until_trained()
        # Once begun it goes on to its end, whatever becomes of the caller: the worker and this object must
        # not come to differ about what is applied.
        await asyncio.shield(asyncio.create_task(self._move(decision, part, payloads)))
        if round_number >= self._membership.run_view.round_number - 2:  # older ones interest nobody
            for moved in self._moves(stage, part):
                await self._attest(stage, round_number, moved, self._anchors[stage, moved][1])

    async def _move(self, decision: Decision, part: Part, payloads: Sequence[bytes]) -> None:
        stage, round_number = decision.stage, decision.round_number
        async with self._between_steps:
            if self._anchors[stage, part][0] >= round_number:
                return
            assert self._anchors[stage, part][0] == round_number - 1, "decisions are applied in their order"
            apply = self._apply_to_embedding if part is Part.EMBEDDING else self._apply_to_stage
            for moved, digest in (await apply(decision, payloads)).items():
                self._anchors[stage, moved] = (round_number, digest)

    @staticmethod
    def _moves(stage: int, part: Part) -> tuple[Part, ...]:
        """What changes with this part of `stage`: the embedding is a part of stage 0."""
        return (Part.STAGE, Part.EMBEDDING) if (stage, part) == (0, Part.STAGE) else (part,)

    async def _apply_to_stage(self, decision: Decision, payloads: Iterable[bytes]) -> dict[Part, str]:
        """The digests after it. Stage 0's change that of the embedding, too."""
        stage, round_number = decision.stage, decision.round_number
        pending = self._pending.get(stage)
        if not decision.committed:
            log.warning("round %d of stage %d was aborted: %s", round_number, stage, decision.reason)
            await self._worker.call(Abort(stage, round_number))
            self._pending.pop(stage, None)
            return {part: self._anchors[stage, part][1] for part in self._moves(stage, Part.STAGE)}
        mine_included = any(entry.descriptor == pending for entry in decision.entries)
        weights = tuple(entry.descriptor.weight for entry in decision.entries)
        result = await self._worker.call(Commit(stage, round_number, tuple(payloads), weights, mine_included))
        self._pending.pop(stage, None)
        owners = [entry.descriptor.owner for entry in decision.entries]
        if self._identity.peer in owners and not mine_included:
            # What it sent before it was started anew is in the anchor now, and still in what it kept: it
            # would count twice.
            await self._worker.call(ResetError(stage))
        digests = {Part.STAGE: result.digest}
        if result.embedding_digest is not None:
            digests[Part.EMBEDDING] = result.embedding_digest
        return digests

    async def _apply_to_embedding(self, decision: Decision, payloads: Iterable[bytes]) -> dict[Part, str]:
        # An aborted round has no entries: then the embedding stays as it is.
        weights = tuple(entry.descriptor.weight for entry in decision.entries)
        digest = await self._worker.call(CommitEmbedding(decision.round_number, tuple(payloads), weights))
        return {Part.EMBEDDING: digest}

    async def _collect(self, decision: Decision, known: Mapping[PayloadDescriptor, bytes]) -> list[bytes]:
        """The bytes of every entry of the manifest, in its order, each verified against its hash."""
        run_view, me = self._membership.run_view, self._identity.peer

        async def obtain(entry: ManifestEntry) -> bytes:
            descriptor = entry.descriptor
            if descriptor in known:
                return known[descriptor]
            expected = self._stage_info.payload_bytes[decision.stage]
            if descriptor.nbytes != expected or not is_authentic(descriptor):
                raise HetnodeError(
                    ErrorCode.PAYLOAD_CORRUPT,
                    f"Round {decision.round_number} was committed with a payload of {descriptor.nbytes} bytes, not "
                    f"{expected}, or with one that {descriptor.owner} has not signed.",
                    "The coordinator cannot be trusted: leave this run and tell its operator.",
                )
            # Whoever applied it holds it, too; those of the manifest may have gone since. Not everybody asks
            # the same one first.
            holders: list[PeerId] = [*own_order(entry.holders, me), *run_view.hosts_of(decision.stage)]
            anybody = replace(entry, holders=tuple(dict.fromkeys(holders)))
            return await self._transport.fetch_payload(anybody, self._spec.timing.fetch)

        return list(await asyncio.gather(*map(obtain, decision.entries)))


def run_is_over() -> HetnodeError:
    return HetnodeError(
        ErrorCode.RUN_STARTED,
        "The run has finished, and this node had not caught up with it.",
        "The nodes that took part in its last round have the model.",
    )
