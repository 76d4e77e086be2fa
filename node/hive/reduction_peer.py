"""One of the peers that reduce the payloads of a stage in parts, over all rounds."""

from __future__ import annotations

import asyncio
import logging
from typing import AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.p2p import P2P, P2PContext, ServicerBase
from hivemind.proto.averaging_pb2 import BAD_GROUP_ID, AveragingData
from hivemind.utils.asyncio import achain, as_aiter

from node.hive.access import AllowedCalls
from node.hive.part_exchange import PartExchange, PartPlan, Reduction
from node.hive.records import stage_prefix
from node.hive.stream_calls import Guard, GuardedStreams
from node.model.shapes import parameter_shapes
from node.transport.allow_list import AllowList
from node.transport.line import UNLIMITED, Line
from node.transport.open_transfers import OpenTransfers
from node.transport.payload_store import PayloadStore
from node.transport.transfer import linger
from node.transport.transport import ExchangeResult, RoundEnd
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.envelope import is_authentic
from protocol.types import ExchangeGroup, PayloadDescriptor, Rejection, ResultClaim
from protocol.wire.counted_result import CountedResult
from protocol.wire.reduction import ReductionLayout, cut_payload
from protocol.wire.stage_reducers import StageReducers

log = logging.getLogger(__name__)

FIRST_SECONDS = 10.0  # longest wait for the first message of a stream
_LACKS = "as a reducer it has not sent all of its sums"
GROUP_SECONDS = 60.0  # longest wait of a member for this one to join the group


class ReductionPeer(ServicerBase):  # type: ignore[misc]  # hivemind has no type information
    """Takes and answers the parts of one stage. Belongs to one event loop; one round at a time.

    hivemind derives the names of the remote calls from the names of this class and its rpc method: renaming
    them changes the wire.

    Args:
        spec: of a run with exchange "reduced".
        store: keeps the results of `stage`, from which other peers fetch them by their hash.
        line: what this node may send and receive.
    """

    def __init__(
        self, p2p: P2P, run: str, stage: int, spec: RunSpec, store: PayloadStore, line: Line = UNLIMITED
    ) -> None:
        self._p2p, self._run, self._stage, self._store, self._line = p2p, run, stage, store, line
        self._layout = ReductionLayout(parameter_shapes(spec, stage), spec.outer)
        self._reducers = StageReducers(self._layout)
        self._exchange: PartExchange | None = None  # the newest, which may be over
        self._joined = asyncio.Event()  # set and then replaced with each change of it
        self._waiting = OpenTransfers()

    async def serve(self, allow_list: AllowList, guard: Guard = GuardedStreams) -> None:
        """Answer the peers of the allow list from now on, over the streams that `guard` lets in."""
        await self.add_p2p_handlers(
            guard(self._p2p, allow_list), AllowedCalls(self, allow_list), namespace=self._prefix
        )

    async def reduce(
        self, own: PayloadDescriptor, payload: bytes, group: ExchangeGroup, seconds: float
    ) -> ExchangeResult:
        """Reduce the payloads of `group` in parts. The result is in the store afterwards.

        Without all parts, and in a group of which no plan can be made, this member has no result. It then
        fetches that of the others when the round is committed.
        """
        if not all(is_authentic(each, self._run) for each in group.descriptors):
            log.warning("group %s has descriptors without a valid signature", group.group_id)
            return ExchangeResult((own,))
        try:
            plan = PartPlan.of_group(self._layout, group)
        except ValueError as error:
            log.warning("group %s cannot be reduced: %s", group.group_id, error)
            return ExchangeResult((own,))
        position = plan.members.index(self._p2p.peer_id)
        sent = await asyncio.to_thread(cut_payload, self._layout, payload, plan.all_parts)
        reducers = await asyncio.to_thread(self._reducers.for_parts, plan.parts[position])
        network = self._p2p, ReductionPeer, self._prefix, group.group_id.encode()
        self._exchange = PartExchange(*network, plan, sent, reducers, seconds, self._line)
        self._joined.set()
        self._joined = asyncio.Event()
        reduction = await self._exchange.exchange()
        claim = await asyncio.to_thread(self._keep, own.round_number, reduction)
        lacking = [group.descriptors[position] for position in reduction.lacks]
        return ExchangeResult((own,), tuple(Rejection(each, _LACKS) for each in lacking), claim)

    async def end_round(self, ended: RoundEnd) -> None:
        """See :meth:`node.transport.transport.Transport.end_round`."""
        await asyncio.to_thread(self._end_round, ended)

    def _keep(self, round_number: int, reduction: Reduction) -> ResultClaim | None:
        if (data := reduction.to_bytes()) is None:
            return None
        claim = reduction.claim(data)
        self._store.put(round_number, claim.sha256, data)
        return claim

    def _end_round(self, ended: RoundEnd) -> None:
        before = self._reducers.lost_norm
        if ended.rolled_back:
            self._reducers.clear()
        elif ended.result is None:
            self._reducers.abort()
        elif (data := self._store.get(ended.round_number, ended.result)) is None:
            log.warning("stage %d: the result of round %d is not kept", self._stage, ended.round_number)
            self._reducers.clear()
        else:
            try:
                self._reducers.commit(ended.round_number, CountedResult.from_bytes(self._layout, data).result)
            except HetnodeError as error:  # the worker refuses it, too
                log.warning("stage %d, round %d: %s", self._stage, ended.round_number, error.cause)
                self._reducers.clear()
        if (lost := self._reducers.lost_norm) > before:
            log.info("stage %d: residuals of norm %.3g are lost so far", self._stage, lost)

    @property
    def _prefix(self) -> str:
        return stage_prefix(self._run, self._stage)

    # Answers to the calls of other peers

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[AveragingData], context: P2PContext
    ) -> AsyncIterator[AveragingData]:
        """Take the parts of a member of the newest group, and answer each with its sum."""
        exchange = None
        with self._waiting.admit(context.remote_id.to_base58(), "group", 1) as allowed:
            if allowed:
                try:
                    async with asyncio.timeout(FIRST_SECONDS):
                        first = await anext(stream)
                    exchange = await self._exchange_of(first.group_id)
                except (TimeoutError, StopAsyncIteration):
                    pass
        if exchange is None:
            yield AveragingData(code=BAD_GROUP_ID)
            await linger()  # else the refusal may be lost
            return
        async for message in exchange.rpc_aggregate_part(achain(as_aiter(first), stream), context):
            yield message

    async def _exchange_of(self, group_id: bytes) -> PartExchange:
        """The exchange of a group, once this peer has joined it. Raises TimeoutError."""
        async with asyncio.timeout(GROUP_SECONDS):
            while self._exchange is None or self._exchange.group_id != group_id:
                await self._joined.wait()
        return self._exchange
