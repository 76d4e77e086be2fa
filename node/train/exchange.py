"""The outer round of one member: propose, gather, report, and apply exactly what the coordinator committed.

One transaction per hosted stage, all at the same time. A member that does not host stage 0 also follows
stage 0's decisions, because the committed embedding must reach every member of every replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from node.identity import Identity
from node.net.coordinator_client import CoordinatorClient
from node.net.hive.client import Hivemind
from node.net.ipc import Child
from protocol.envelope import is_authentic, sign_descriptor
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import RunSpec
from protocol.types import Decision, Group, ManifestEntry, PayloadDescriptor, Plan, StageRange

log = logging.getLogger(__name__)

_KEEP_ROUNDS = 3
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class RoundOutcome:
    """What became of one round on this member."""

    next_epoch: int
    committed_stages: int
    aborted_stages: int
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
    ) -> None:
        self._spec, self._stages, self._identity = spec, stages, identity
        self._worker, self._hivemind, self._coordinator = worker, hivemind, coordinator
        self._codecs = codecs
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
        committed = [decision for decision, _ in decisions if decision.committed]
        return RoundOutcome(
            next_epoch=decisions[0][0].next_epoch,
            committed_stages=len(committed),
            aborted_stages=len(decisions) - len(committed),
            payload_bytes=sum(nbytes for _, nbytes in decisions),
        )

    async def _stage(self, plan: Plan, stage: int, round_: int) -> tuple[Decision, int]:
        proposal = await self._worker.call("propose", {"stage": stage})
        if not proposal.body["finite"]:
            log.warning(
                "stage %d diverged to non-finite values: restarted from the anchor, nothing sent", stage
            )
            decision = await self._await_decision(stage, round_)
            return await self._apply(decision, {}), 0
        payload = bytes(proposal.blobs[0])
        mine = sign_descriptor(
            PayloadDescriptor(
                run=self._spec.run_id,
                stage=stage,
                round=round_,
                owner=self._identity.peer,
                anchor_digest=self._digests[stage],
                codec=self._codecs[stage],
                weight=1.0,
                nbytes=len(payload),
                sha256=hashlib.sha256(payload).hexdigest(),
            ),
            self._identity.sign,
        )
        held = await self._hivemind.exchange(
            stage,
            round_,
            payload,
            mine,
            await self._match(mine),
            expected=len(plan.replicas),
            deadline=self._spec.timing.fetch,
        )
        decision = await self._coordinator.report(
            stage, round_, held, self._spec.timing.decide + _ANSWER_SECONDS
        )
        return await self._apply(decision, {mine.sha256: payload}), len(payload)

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
        return await self._coordinator.await_decision(stage, round_, deadline)

    async def _apply(self, decision: Decision, known: Mapping[str, bytes]) -> Decision:
        stage, round_ = decision.stage, decision.round
        if not decision.committed:
            log.warning("round %d of stage %d was aborted: %s", round_, stage, decision.reason)
            await self._worker.call("abort", {"stage": stage})
            return decision
        payloads = await self._collect(decision, known)
        mine_included = any(entry.descriptor.owner == self._identity.peer for entry in decision.entries)
        weights = [entry.descriptor.weight for entry in decision.entries]
        body = {"stage": stage, "weights": weights, "mine_included": mine_included}
        reply = await self._worker.call("commit", body, *payloads)
        self._digests[stage] = str(reply.body["digest"])
        await self._coordinator.attest(stage, round_, "stage", self._digests[stage])
        if stage == 0:
            await self._coordinator.attest(0, round_, "embedding", str(reply.body["embedding_digest"]))
        return decision

    async def _follow_embedding(self, round_: int) -> None:
        decision = await self._await_decision(0, round_)
        if decision.committed:
            weights = [entry.descriptor.weight for entry in decision.entries]
            payloads = await self._collect(decision, {})
            reply = await self._worker.call("commit_embedding", {"weights": weights}, *payloads)
            await self._coordinator.attest(0, round_, "embedding", str(reply.body["embedding_digest"]))

    async def _collect(self, decision: Decision, known: Mapping[str, bytes]) -> list[bytes]:
        """The bytes of every entry of the manifest, in its order, each verified against its hash."""

        async def obtain(entry: ManifestEntry) -> bytes:
            descriptor = entry.descriptor
            if descriptor.sha256 in known:
                return known[descriptor.sha256]
            if not is_authentic(descriptor):
                raise HetnodeError(
                    ErrorCode.PAYLOAD_CORRUPT,
                    f"Round {decision.round} was committed with a payload not signed by {descriptor.owner}.",
                    "The coordinator cannot be trusted: leave this run and tell its operator.",
                )
            return await self._hivemind.fetch(decision.stage, decision.round, entry, self._spec.timing.fetch)

        return list(await asyncio.gather(*map(obtain, decision.entries)))
