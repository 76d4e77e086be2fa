"""The payloads of a round: signs the own one, checks those of others, collects those of a decision."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from node.ipc.worker_calls import Screen, StageInfo
from node.ipc.worker_client import WorkerClient
from node.net.membership import Membership
from node.security.identity import Identity
from node.transport.payload_exchange import own_order
from node.transport.transport import Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.envelope import is_authentic, sign_descriptor
from protocol.types import Decision, ManifestEntry, PayloadDescriptor, Plan, Rejection

log = logging.getLogger(__name__)

_LOCAL_SECONDS = 10.0


class RoundPayloads:
    """The payloads that one member sends, gathers and applies."""

    def __init__(
        self,
        spec: RunSpec,
        identity: Identity,
        worker: WorkerClient,
        transport: Transport,
        membership: Membership,
        stage_info: StageInfo,
    ) -> None:
        self._spec, self._identity, self._worker = spec, identity, worker
        self._transport, self._membership, self._stage_info = transport, membership, stage_info

    def describe(
        self, plan: Plan, stage: int, round_number: int, share: float, anchor_digest: str, payload: bytes
    ) -> PayloadDescriptor:
        """The signed descriptor of the own payload, whose weight is `share` of the weight of the replica."""
        replica = plan.replica_of(self._identity.peer)
        assert replica is not None, "this node trains under a plan that assigns it to a replica"
        descriptor = PayloadDescriptor(
            run=self._spec.run_id,
            stage=stage,
            round_number=round_number,
            owner=self._identity.peer,
            anchor_digest=anchor_digest,
            codec=self._stage_info.codecs[stage],
            weight=replica.weight * share,
            nbytes=len(payload),
            sha256=hashlib.sha256(payload).hexdigest(),
        )
        return sign_descriptor(descriptor, self._identity.sign)

    async def check(
        self, plan: Plan, own: PayloadDescriptor, payload: bytes, held: Sequence[PayloadDescriptor]
    ) -> tuple[dict[PayloadDescriptor, bytes], list[Rejection]]:
        """Check the gathered payloads of one (stage, round).

        Returns:
            those that may count, the own one included, with their bytes; and those that must not.
        """
        valid, rejected = {own: payload}, []
        for descriptor in held:
            if descriptor == own:
                continue
            if problem := self._problem_of(descriptor, plan):
                rejected.append(Rejection(descriptor, problem))
            else:
                entry = ManifestEntry(descriptor, (self._identity.peer,))  # this peer holds it already
                valid[descriptor] = await self._transport.fetch_payload(entry, _LOCAL_SECONDS)
        problems = await self._worker.call(Screen(own.stage, tuple(valid.values())))
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

    async def collect(self, decision: Decision, known: Mapping[PayloadDescriptor, bytes]) -> list[bytes]:
        """The bytes of every entry of a manifest in its order, each verified against its hash.

        Args:
            known: payloads that were gathered before; only others are fetched.

        Raises HetnodeError: PAYLOAD_UNAVAILABLE, PAYLOAD_CORRUPT, or the death of the transport.
        """

        async def obtain(entry: ManifestEntry) -> bytes:
            held = known.get(entry.descriptor)
            return await self._fetch(entry) if held is None else held

        return list(await asyncio.gather(*map(obtain, decision.entries)))

    def _problem_of(self, descriptor: PayloadDescriptor, plan: Plan) -> str:
        """Why a payload must not count, as far as its descriptor tells; "" where it may."""
        replica = plan.replica_of(descriptor.owner)
        if replica is None or replica.host_of(descriptor.stage).peer != descriptor.owner:
            return f"its owner does not host stage {descriptor.stage} in plan {plan.epoch}"
        if descriptor.weight > replica.weight:
            return f"its weight is {descriptor.weight}, the plan gives it {replica.weight}"
        expected = self._stage_info.payload_bytes[descriptor.stage]
        if descriptor.nbytes != expected:
            return f"it has {descriptor.nbytes} bytes, every payload of this stage has {expected}"
        return ""

    async def _fetch(self, entry: ManifestEntry) -> bytes:
        descriptor = entry.descriptor
        expected = self._stage_info.payload_bytes[descriptor.stage]
        if descriptor.nbytes != expected or not is_authentic(descriptor):
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"Round {descriptor.round_number} was committed with a payload of {descriptor.nbytes} bytes, "
                f"not {expected}, or with one that {descriptor.owner} has not signed.",
                "The coordinator cannot be trusted: leave this run and tell its operator.",
            )
        # The holders of the manifest may have left. Every peer that applied the payload holds it, too.
        hosts = self._membership.run_view.hosts_of(descriptor.stage)
        holders = [*own_order(entry.holders, self._identity.peer), *hosts]
        wider = replace(entry, holders=tuple(dict.fromkeys(holders)))
        return await self._transport.fetch_payload(wider, self._spec.timing.fetch)
