"""The payloads of a round: signs the own one, checks those of others, collects those of a decision."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from node.core.train.services import Services
from node.exchange.payload_exchange import own_order
from node.ipc.stored_payload import StoredPayload, sha256_of
from node.ipc.worker_calls import Screen, StageInfo
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import is_authentic, sign_descriptor
from protocol.types import (
    Committed,
    CommittedResult,
    ManifestEntry,
    PayloadDescriptor,
    PeerId,
    Plan,
    Rejection,
)

log = logging.getLogger(__name__)

_LOCAL_SECONDS, _PLAN_SECONDS = 10.0, 2.0
NOBODY = PeerId("")
"""The owner of a result."""


class RoundPayloads:
    """The payloads that one member sends, gathers and applies."""

    def __init__(self, services: Services, stage_info: StageInfo) -> None:
        self._services, self._stage_info, self._peer = services, stage_info, services.identity.peer

    def describe(
        self, plan: Plan, stage: int, round_number: int, share: float, anchor_digest: str, payload: bytes
    ) -> PayloadDescriptor:
        """The signed descriptor of the own payload, whose weight is `share` of the weight of the replica."""
        replica = plan.replica_of(self._peer)
        assert replica is not None, "this node trains under a plan that assigns it to a replica"
        descriptor = PayloadDescriptor(
            run=self._services.run,
            stage=stage,
            round_number=round_number,
            owner=self._peer,
            anchor_digest=anchor_digest,
            codec=self._stage_info.payloads[stage].codec,
            weight=replica.weight * share,
            nbytes=len(payload),
            epoch=plan.epoch,
            sha256=sha256_of(payload),
        )
        return sign_descriptor(descriptor, self._services.identity.sign)

    async def screen(
        self, plan: Plan, own: PayloadDescriptor, held: Sequence[PayloadDescriptor]
    ) -> tuple[dict[PayloadDescriptor, StoredPayload], list[Rejection]]:
        """The payloads of one (stage, round) that may count, and those that must not.

        The worker opens those of others, and has the own one, which it has proposed.
        """
        valid, rejected = {own: StoredPayload(own.sha256)}, []
        plan = await self._plan_of(plan, own.round_number, held)
        for descriptor in held:
            if descriptor == own:
                continue
            if problem := self._problem_of(descriptor, plan):
                rejected.append(Rejection(descriptor, problem))
            else:
                entry = ManifestEntry(descriptor, (self._peer,))  # this peer holds it already
                valid[descriptor] = await self._services.transport.fetch_payload(entry, _LOCAL_SECONDS)
        problems = await self._services.worker.call(Screen(own.stage, tuple(valid.values())))
        for descriptor, problem in zip(list(valid), problems, strict=True):
            if problem and descriptor != own:
                del valid[descriptor]
                rejected.append(Rejection(descriptor, problem))
        for rejection in rejected:
            log.warning(
                "stage %d, round %d: rejected the payload of %s: %s",
                *(own.stage, own.round_number, rejection.descriptor.owner, rejection.reason),
            )
        return valid, rejected

    async def collect(
        self, decision: Committed, known: Mapping[PayloadDescriptor, StoredPayload]
    ) -> list[StoredPayload]:
        """Every payload of a manifest in its order, or the result of its group.

        Only payloads that are not in `known` are fetched.

        Raises HetnodeError: PAYLOAD_UNAVAILABLE, PAYLOAD_CORRUPT, or the death of the transport.
        """

        async def obtain(entry: ManifestEntry) -> StoredPayload:
            held = known.get(entry.descriptor)
            return await self._fetch(entry) if held is None else held

        if decision.result is not None:
            found = [await self._fetch_result(decision, decision.result)]
        else:
            found = list(await asyncio.gather(*map(obtain, decision.entries)))
        if self._services.worker.reads_files:
            return found
        most = self._stage_info.capacities[decision.stage]
        return [await asyncio.to_thread(each.inlined, most) for each in found]

    async def _plan_of(self, plan: Plan, round_number: int, held: Sequence[PayloadDescriptor]) -> Plan:
        """The plan under which payloads of a round were made: `plan`, or one that repairs replicas."""
        newest = max((each.epoch for each in held), default=0)
        membership = self._services.membership
        if newest > plan.epoch:  # the coordinator has adopted that plan before the group closed
            with suppress(TimeoutError):
                async with asyncio.timeout(_PLAN_SECONDS):
                    await membership.until(lambda view: view.epoch >= newest or None)
        found = membership.run_view.plan_for(round_number)
        return found if found is not None and found.goes_on_from(plan.epoch) else plan

    def _problem_of(self, descriptor: PayloadDescriptor, plan: Plan) -> str:
        """Why a payload must not count, as far as its descriptor tells; "" where it may."""
        replica = plan.replica_of(descriptor.owner)
        if replica is None or replica.host_of(descriptor.stage).peer != descriptor.owner:
            return f"its owner does not host stage {descriptor.stage} in plan {plan.epoch}"
        if descriptor.weight > replica.weight:
            return f"its weight is {descriptor.weight}, the plan gives it {replica.weight}"
        expected = self._stage_info.payloads[descriptor.stage].nbytes
        if descriptor.nbytes != expected:
            return f"it has {descriptor.nbytes} bytes, every payload of this stage has {expected}"
        return ""

    async def _fetch(self, entry: ManifestEntry) -> StoredPayload:
        descriptor = entry.descriptor
        expected = self._stage_info.payloads[descriptor.stage].nbytes
        if descriptor.nbytes != expected or not is_authentic(descriptor, self._services.run):
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"Round {descriptor.round_number} was committed with a payload of {descriptor.nbytes} bytes, "
                f"not {expected}, or with one that {descriptor.owner} has not signed.",
                "The coordinator cannot be trusted: leave this run and tell its operator.",
            )
        # The holders of the manifest may have left. Every peer that applied the payload holds it, too.
        hosts = self._services.membership.run_view.hosts_of(descriptor.stage)
        # Members before the coordinator's peer, which serves contested payloads to all peers of the run.
        members = own_order(set(entry.holders) & {*hosts, descriptor.owner}, self._peer)
        holders = [*members, *own_order(set(entry.holders) - set(members), self._peer), *hosts]
        wider = replace(entry, holders=tuple(dict.fromkeys(holders)))
        return await self._services.transport.fetch_payload(wider, self._services.spec.timing.fetch)

    async def _fetch_result(self, decision: Committed, result: CommittedResult) -> StoredPayload:
        stage = decision.stage
        if result.nbytes > (most := self._stage_info.capacities[stage]):
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"Round {decision.round_number} was committed with a result of {result.nbytes} bytes; "
                f"stage {stage} has at most {most}.",
                "The coordinator cannot be trusted: leave this run and tell its operator.",
            )
        # Peers find payloads by round and hash. A result has no owner, and nothing else of this is read.
        named = PayloadDescriptor(
            run=self._services.run,
            stage=stage,
            round_number=decision.round_number,
            owner=NOBODY,
            anchor_digest="",
            codec="",
            weight=0.0,
            nbytes=result.nbytes,
            epoch=0,
            sha256=result.sha256,
        )
        # Nearly all hosts have the result: each member begins with another one of them.
        hosts = self._services.membership.run_view.hosts_of(stage)
        holders = own_order({*result.holders, *hosts}, self._peer)
        entry = ManifestEntry(named, tuple(holders))
        return await self._services.transport.fetch_payload(entry, self._services.spec.timing.fetch)
