"""The contribution of one member to a round: propose, match, exchange, screen, report, apply.

All stages do this at the same time, each in a transaction of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from node.core.train.commits import OwnPayload
from node.core.train.member_anchors import ANSWER_SECONDS, MemberAnchors
from node.core.train.round_gates import RoundGates
from node.core.train.services import Services
from node.ipc.worker_calls import Propose
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.turns import is_due
from protocol.spec.fixed import LEAST_SHARE
from protocol.status import PayloadAgreement, Wait
from protocol.types import Decision, ExchangeGroup, Part, PayloadDescriptor, Plan

log = logging.getLogger(__name__)

_EARLY_SECONDS, _LONGEST_PAUSE = 0.2, 10.0


@dataclass(frozen=True)
class RoundOutcome:
    """The result of a round on this member: the epoch of the next round's plan, bytes of own payloads.

    `is_finite`: no payload was withheld because its values are not finite. For the other fields see
    protocol.status.Measurement.
    """

    next_epoch: int
    payload_bytes: int
    progress_norm: float = 0.0
    error_norm: float = 0.0
    agreements: tuple[PayloadAgreement, ...] = ()
    is_finite: bool = True


@dataclass(frozen=True)
class RoundExchange:
    """Contributes to rounds with what `anchors` holds. On any error the same round may be tried again."""

    services: Services
    anchors: MemberAnchors

    async def contribute(
        self, plan: Plan, round_number: int, share: float, gates: RoundGates
    ) -> RoundOutcome:
        """Propose payloads for a round, and apply its decisions to everything that this member holds.

        The coordinator hears of the anchors of the round before first. `share` is the part of the inner phase
        that this replica has done, and scales the weight; below LEAST_SHARE it proposes nothing.

        Raises HetnodeError: UNKNOWN_PEER, ROUND_IN_DOUBT, PAYLOAD_UNAVAILABLE, ANCHOR_DIVERGED, ...
        """
        anchors = self.anchors
        await anchors.attestations.told()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.exchange_round(plan, stage, round_number, share, gates))
                for stage in anchors.stages
            ]
            if (0, Part.EMBEDDING) in anchors.parts:
                group.create_task(anchors.follow_part(0, Part.EMBEDDING, round_number, gates=gates))
        decisions, nbytes = zip(*(task.result() for task in tasks), strict=True)
        results = anchors.commits.measured_in(round_number)
        return RoundOutcome(
            decisions[0].next_epoch,
            payload_bytes=sum(filter(None, nbytes)),
            progress_norm=math.hypot(*(result.progress_norm for result, _ in results)),
            error_norm=math.hypot(*(result.error_norm for result, _ in results)),
            agreements=tuple(each for _, agreements in results for each in agreements),
            is_finite=None not in nbytes,
        )

    async def exchange_round(
        self, plan: Plan, stage: int, round_number: int, share: float, gates: RoundGates
    ) -> tuple[Decision, int | None]:
        """The transaction of one stage: its decision, and the bytes of the own payload; None: not finite."""
        anchors, services, spec = self.anchors, self.services, self.services.spec
        waits, coordinator = services.figures.waits, services.coordinator

        payload: bytes | None = b""
        epoch = 0
        if is_due(spec, stage, round_number):
            payload, epoch = await self._propose(stage, round_number, share), plan.epoch
        gates.mark_proposed(stage)
        if not payload:
            decision = await anchors.follow_part(stage, Part.STAGE, round_number, epoch, gates)
            return decision, None if payload is None else 0

        digest = anchors.digest_of(stage)
        own = anchors.payloads.describe(plan, stage, round_number, share, digest, payload)
        anchors.commits.pending[stage] = OwnPayload(own)
        with waits.on(Wait.GROUP):
            group = await self._match(own)
        anchors.commits.pending[stage] = OwnPayload.in_group(own, group)

        with waits.on(Wait.PAYLOADS):
            gathered = await services.transport.exchange(
                payload,
                own,
                group,
                expected=len(plan.replicas),
                deadline=(group.seconds if group else 0.0) or spec.timing.fetch,
            )
        valid, rejected = await anchors.payloads.screen(plan, own, gathered.held)

        held = [descriptor for descriptor in gathered.held if descriptor in valid]
        all_rejected = sorted((*gathered.rejected, *rejected), key=lambda each: each.descriptor.owner)
        deadline = spec.timing.decide + ANSWER_SECONDS
        with waits.on(Wait.DECISION):
            decision = await anchors.while_away(
                lambda: coordinator.report(stage, round_number, held, all_rejected, deadline, gathered.claim)
            )
        await anchors.apply(decision, Part.STAGE, valid, gates)
        return decision, len(payload)

    async def _propose(self, stage: int, round_number: int, share: float) -> bytes | None:
        """The payload; empty where the replica has trained too little or is late, None if it has diverged."""
        if share < LEAST_SHARE or self.services.membership.run_view.round_number > round_number:
            log.warning("round %d ends without a payload of this node, and a later one has it", round_number)
            return b""
        async with self.anchors.between_steps:
            payload = await self.services.worker.call(Propose(stage, share))
        if payload is None:
            log.warning("stage %d has non-finite values: it restarts from the anchor, nothing is sent", stage)
        return payload

    async def _match(self, own: PayloadDescriptor) -> ExchangeGroup | None:
        """The coordinator's group; None where it is away, so that the transport finds a group."""
        deadline, pause = self.services.spec.timing.match_window + ANSWER_SECONDS, _EARLY_SECONDS
        while True:
            try:
                return await self.services.coordinator.match(own, deadline)
            except HetnodeError as error:
                if error.code is ErrorCode.OFFER_TOO_EARLY:
                    log.info("%s", error)
                elif error.code is ErrorCode.COORDINATOR_UNREACHABLE:
                    where = f"round {own.round_number} of stage {own.stage}"
                    log.warning("matching %s in the network of the peers: %s", where, error)
                    return None
                else:
                    raise
            # This machine has become much faster than it was: the coordinator soon believes it.
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
