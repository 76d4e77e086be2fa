"""The outer round of one member: propose, gather, report, and apply exactly what the coordinator committed.

One transaction per hosted stage, all at the same time. A member that does not host stage 0 also follows
stage 0's decisions, because the committed embedding must reach every member of every replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from node.identity import Identity
from node.net.coordinator_client import CoordinatorClient
from node.net.hive.client import Hivemind
from node.net.ipc import Child
from protocol.envelope import is_authentic, sign_descriptor
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import RunSpec
from protocol.types import Decision, Group, ManifestEntry, PayloadDescriptor, Plan, Rejection, StageRange

log = logging.getLogger(__name__)

_KEEP_ROUNDS = 3
_ANSWER_SECONDS = 10.0
_RETRY_SECONDS = 1.0
T = TypeVar("T")
_LOCAL_SECONDS = 10.0


@dataclass(frozen=True)
class RoundOutcome:
    """What became of one round on this member."""

    next_epoch: int
    payload_bytes: int


class OuterExchange:
    """Runs the outer rounds of one member.

    Every anchor change goes through :meth:`run`; on any error nothing was applied to the stage concerned.
    """

    def __init__(
        self,
        spec: RunSpec,
        stages: StageRange,
        identity: Identity,
        worker: Child,
        hivemind: Hivemind,
        coordinator: CoordinatorClient,
        codecs: Mapping[int, str],
        digests: Mapping[int, str],
        payload_bytes: Mapping[int, int],
    ) -> None:
        self._spec, self._stages, self._identity = spec, stages, identity
        self._worker, self._hivemind, self._coordinator = worker, hivemind, coordinator
        self._codecs, self._payload_bytes = codecs, payload_bytes
        self._digests = dict(digests)

    async def run(self, plan: Plan, round_: int) -> RoundOutcome:
        """Bring round `round_` of every hosted stage to its decision and apply it.

        Raises HetnodeError: COORDINATOR_UNREACHABLE, PAYLOAD_UNAVAILABLE, ANCHOR_DIVERGED, ...
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stage(plan, stage, round_)) for stage in self._stages]
            if 0 not in self._stages:
                group.create_task(self._follow_embedding(round_))
        decisions = [task.result() for task in tasks]
        if round_ > _KEEP_ROUNDS:
            await self._hivemind.forget(round_ - _KEEP_ROUNDS)
        return RoundOutcome(
            next_epoch=decisions[0][0].next_epoch,
            payload_bytes=sum(nbytes for _, nbytes in decisions),
        )

    async def _stage(self, plan: Plan, stage: int, round_: int) -> tuple[Decision, int]:
        proposal = await self._worker.call("propose", {"stage": stage})
        if not proposal.body["finite"]:
            log.warning(
                "stage %d diverged to non-finite values: restarted from the anchor, nothing sent", stage
            )
            decision = await self._await_decision(stage, round_)
            return await self._apply(decision, {}, None), 0
        payload = bytes(proposal.blobs[0])
        replica = plan.replica_of(self._identity.peer)
        assert replica is not None, "this node trains under a plan that gives it a place"
        mine = sign_descriptor(
            PayloadDescriptor(
                run=self._spec.run_id,
                stage=stage,
                round=round_,
                owner=self._identity.peer,
                anchor_digest=self._digests[stage],
                codec=self._codecs[stage],
                weight=replica.weight,
                nbytes=len(payload),
                sha256=hashlib.sha256(payload).hexdigest(),
            ),
            self._identity.sign,
        )
        gathered = await self._hivemind.exchange(
            stage,
            round_,
            payload,
            mine,
            await self._match(mine),
            expected=len(plan.replicas),
            deadline=self._spec.timing.fetch,
        )
        known, rejected = await self._screen(plan, mine, payload, gathered.held)
        held = [descriptor for descriptor in gathered.held if descriptor in known]
        refused = sorted((*gathered.rejected, *rejected), key=lambda each: each.descriptor.owner)
        seconds = self._spec.timing.decide + _ANSWER_SECONDS
        decision = await self._patiently(
            lambda: self._coordinator.report(stage, round_, held, refused, seconds)
        )
        return await self._apply(decision, known, mine), len(payload)

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
                fetch = self._hivemind.fetch(mine.stage, mine.round, entry, _LOCAL_SECONDS)
                known[descriptor] = await fetch
        reply = await self._worker.call("screen", {"stage": mine.stage}, *known.values())
        for descriptor, problem in zip(list(known), reply.body["problems"], strict=True):
            if problem and descriptor != mine:
                del known[descriptor]
                rejected.append(Rejection(descriptor, problem))
        for rejection in rejected:
            where, owner = f"stage {mine.stage}, round {mine.round}", rejection.descriptor.owner
            log.warning("%s: refused the payload of %s: %s", where, owner, rejection.reason)
        return known, rejected

    def _problem(self, plan: Plan, descriptor: PayloadDescriptor) -> str:
        """Why a payload must not count, whatever its bytes are; "" where nothing speaks against it."""
        replica = plan.replica_of(descriptor.owner)
        if replica is None or replica.host_of(descriptor.stage).peer != descriptor.owner:
            return f"its owner does not host stage {descriptor.stage} in plan {plan.epoch}"
        if descriptor.weight > replica.weight:
            return f"its weight is {descriptor.weight}, the plan gives it {replica.weight}"
        expected = self._payload_bytes[descriptor.stage]
        if descriptor.nbytes != expected:
            return f"it has {descriptor.nbytes} bytes, every payload of this stage has {expected}"
        return ""

    async def _match(self, mine: PayloadDescriptor) -> Group | None:
        """The coordinator's group; None where it is away, so that hivemind's own matchmaking is used."""
        try:
            return await self._coordinator.match(mine, self._spec.timing.match_window + _ANSWER_SECONDS)
        except HetnodeError as error:
            if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                raise
            log.warning("matching round %d of stage %d through the DHT: %s", mine.round, mine.stage, error)
            return None

    async def _await_decision(self, stage: int, round_: int) -> Decision:
        timing = self._spec.timing
        deadline = timing.match_window + timing.fetch + timing.decide + _ANSWER_SECONDS
        return await self._patiently(lambda: self._coordinator.await_decision(stage, round_, deadline))

    async def _attest(self, stage: int, round_: int, part: str, digest: str) -> None:
        await self._patiently(lambda: self._coordinator.attest(stage, round_, part, digest))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call, which the coordinator may safely hear twice, while the coordinator is away.

        Raises HetnodeError: ROUND_IN_DOUBT after ``timing.outage`` seconds; nothing was guessed meanwhile.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            try:
                return await call()
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                away = clock() - began
                if away > self._spec.timing.outage:
                    raise HetnodeError(
                        ErrorCode.ROUND_IN_DOUBT,
                        f"The coordinator has not answered for {away:.0f} s, so the round cannot be settled.",
                        "Nothing was applied that it did not commit. Ask the operator, and join again.",
                    ) from None
                log.warning("waiting for the coordinator: %s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _apply(
        self,
        decision: Decision,
        known: Mapping[PayloadDescriptor, bytes],
        mine: PayloadDescriptor | None,
    ) -> Decision:
        stage, round_ = decision.stage, decision.round
        if not decision.committed:
            log.warning("round %d of stage %d was aborted: %s", round_, stage, decision.reason)
            await self._worker.call("abort", {"stage": stage})
            return decision
        payloads = await self._collect(decision, known)
        mine_included = any(entry.descriptor == mine for entry in decision.entries)
        weights = [entry.descriptor.weight for entry in decision.entries]
        body = {"stage": stage, "weights": weights, "mine_included": mine_included}
        reply = await self._worker.call("commit", body, *payloads)
        self._digests[stage] = str(reply.body["digest"])
        await self._attest(stage, round_, "stage", self._digests[stage])
        if stage == 0:
            await self._attest(0, round_, "embedding", str(reply.body["embedding_digest"]))
        return decision

    async def _follow_embedding(self, round_: int) -> None:
        decision = await self._await_decision(0, round_)
        if decision.committed:
            weights = [entry.descriptor.weight for entry in decision.entries]
            payloads = await self._collect(decision, {})
            reply = await self._worker.call("commit_embedding", {"weights": weights}, *payloads)
            await self._attest(0, round_, "embedding", str(reply.body["embedding_digest"]))

    async def _collect(self, decision: Decision, known: Mapping[PayloadDescriptor, bytes]) -> list[bytes]:
        """The bytes of every entry of the manifest, in its order, each verified against its hash."""

        async def obtain(entry: ManifestEntry) -> bytes:
            descriptor = entry.descriptor
            if descriptor in known:
                return known[descriptor]
            expected = self._payload_bytes[decision.stage]
            if descriptor.nbytes != expected or not is_authentic(descriptor):
                raise HetnodeError(
                    ErrorCode.PAYLOAD_CORRUPT,
                    f"Round {decision.round} was committed with a payload of {descriptor.nbytes} bytes, not "
                    f"{expected}, or with one that {descriptor.owner} has not signed.",
                    "The coordinator cannot be trusted: leave this run and tell its operator.",
                )
            return await self._hivemind.fetch(decision.stage, decision.round, entry, self._spec.timing.fetch)

        return list(await asyncio.gather(*map(obtain, decision.entries)))
