"""One of the peers that reduce the payloads of a stage in parts, over all rounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto.averaging_pb2 import BAD_GROUP_ID, AveragingData
from hivemind.utils.asyncio import achain, as_aiter

from node import hooks
from node.core.model.shapes import parameter_shapes
from node.exchange.allow_list import AllowList
from node.exchange.hive.records import stage_prefix
from node.exchange.hive.reduction.part_check import PartCheck
from node.exchange.hive.reduction.part_exchange import PartExchange
from node.exchange.hive.reduction.part_plan import PartPlan, Reduction
from node.exchange.hive.stream_calls import AllowedCalls, Guard, GuardedStreams
from node.exchange.open_transfers import OpenTransfers
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import linger
from node.exchange.transport import ExchangeResult, RoundEnd
from protocol.errors import HetnodeError
from protocol.pb.payload_pb2 import CountReply, CountRequest, PushReply, SignReply
from protocol.reduction.counted_result import CountedResult
from protocol.reduction.parts import ReductionLayout, cut_payload
from protocol.reduction.stage_reducers import StageReducers
from protocol.server.line import UNLIMITED, Line
from protocol.spec.run import RunSpec
from protocol.trust.envelope import Signer, is_authentic
from protocol.types import ExchangeGroup, PayloadDescriptor, Rejection, ResultClaim

log = logging.getLogger(__name__)

FIRST_SECONDS = 10.0  # longest wait for the first message of a stream
GROUP_SECONDS = 60.0  # longest wait of a member for this one to join the group
_LACKS = "as a reducer it has not sent all of its sums, signed by its checker"
_FALSE = "as a reducer it has false sums"
_UNSIGNED = "as a checker it has not signed the sums of this member"
_NO_GROUP = "this peer is in no such group with you"


class ReductionPeer(ServicerBase):  # type: ignore[misc]  # hivemind has no type information
    """Takes and answers the parts of one stage. Belongs to one event loop; one round at a time.

    hivemind derives the names of the remote calls from the names of this class and its rpc method: renaming
    them changes the wire.

    Args:
        spec: of a run with exchange "reduced".
        store: keeps the results of `stage`, from which other peers fetch them by their hash.
        sign: with the key of this peer.
        line: what this node may send and receive.
    """

    def __init__(
        self,
        p2p: P2P,
        run: str,
        stage: int,
        spec: RunSpec,
        store: PayloadStore,
        sign: Signer,
        line: Line = UNLIMITED,
    ) -> None:
        self._p2p, self._run, self._stage, self._store, self._line = p2p, run, stage, store, line
        self._sign, self._layout = sign, ReductionLayout(parameter_shapes(spec, stage), spec.outer)
        self._own, self._checked = StageReducers(self._layout), StageReducers(self._layout)
        self._round: tuple[PartExchange, PartCheck] | None = None  # the newest, which may be over
        self._joined = asyncio.Event()  # set and then replaced with each change of it
        self._waiting = OpenTransfers()
        self._exchanging: asyncio.Task[Reduction] | None = None
        self._settling = asyncio.Lock()  # protects what is held back for the checked member

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
        if own not in group.descriptors or not all(
            is_authentic(each, self._run) for each in group.descriptors
        ):
            log.warning("group %s lacks this member, or valid signatures", group.group_id)
            return ExchangeResult((own,))
        try:
            plan = PartPlan.of_group(self._layout, group)
        except ValueError as error:
            log.warning("group %s cannot be reduced: %s", group.group_id, error)
            return ExchangeResult((own,))
        position = plan.members.index(self._p2p.peer_id)
        sent = await asyncio.to_thread(cut_payload, self._layout, payload, plan.all_parts)
        group_id, line = group.group_id.encode(), self._line
        exchange = PartExchange(
            self._p2p, ReductionPeer, self._prefix, group_id, plan, sent, self._own, seconds, line
        )
        check = PartCheck(plan, position, group_id, self._checked, self._settling, self._sign, seconds, line)
        self._round = exchange, check
        self._joined.set()
        self._joined = asyncio.Event()
        copying = asyncio.create_task(check.send_copies(sent, self._stub))
        self._exchanging = asyncio.create_task(exchange.exchange())
        try:
            await asyncio.wait({self._exchanging})
        finally:
            copying.cancel()
            self._exchanging.cancel()
        if self._exchanging.cancelled():
            return ExchangeResult((own,))
        reduction = self._exchanging.result()
        claim = await asyncio.to_thread(self._keep, own.round_number, reduction)
        return ExchangeResult((own,), tuple(_accusations(group, position, reduction, check)), claim)

    def break_off(self) -> None:
        """End :meth:`reduce` now, without a result: its caller has given up."""
        if self._exchanging is not None:
            self._exchanging.cancel()

    async def end_round(self, ended: RoundEnd) -> None:
        """See :meth:`node.exchange.transport.Transport.end_round`."""
        async with self._settling:
            await asyncio.to_thread(self._end_round, ended)

    def _keep(self, round_number: int, reduction: Reduction) -> ResultClaim | None:
        if (data := reduction.to_bytes()) is None:
            return None
        claim = reduction.claim(data)
        self._store.put(round_number, claim.sha256, data)
        return claim

    def _end_round(self, ended: RoundEnd) -> None:
        before = self._own.lost_norm
        for reducers in (self._own, self._checked):
            if ended.rolled_back:
                reducers.clear()
            elif ended.result is None:
                reducers.abort()
            else:
                self._commit(reducers, ended.round_number, ended.result)
        if (lost := self._own.lost_norm) > before:
            log.info("stage %d: residuals of norm %.3g are lost so far", self._stage, lost)

    def _commit(self, reducers: StageReducers, round_number: int, sha256: str) -> None:
        data = self._store.get(round_number, sha256)
        try:
            if data is not None:
                reducers.commit(round_number, CountedResult.from_bytes(self._layout, data).result)
                return
            problem = "it is not kept"
        except HetnodeError as error:  # the worker refuses it, too
            problem = error.cause
        log.warning("stage %d, the result of round %d: %s", self._stage, round_number, problem)
        reducers.clear()

    @property
    def _prefix(self) -> str:
        return stage_prefix(self._run, self._stage)

    def _stub(self, peer: PeerID) -> Any:
        hooks.current().before_contact(peer.to_base58())
        return self.get_stub(self._p2p, peer, namespace=self._prefix)

    # Answers to the calls of other peers

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[AveragingData], context: P2PContext
    ) -> AsyncIterator[AveragingData]:
        """Take the parts of a member of the newest group, and answer each with its sum."""
        found = await self._joined_by("parts", stream, context)
        if found is None:
            yield AveragingData(code=BAD_GROUP_ID)
            await linger()  # else the refusal may be lost
            return
        (exchange, _), messages = found
        async for message in exchange.rpc_aggregate_part(messages, context):
            yield message

    async def rpc_copy(self, stream: AsyncIterator[AveragingData], context: P2PContext) -> PushReply:
        """Take copies of the parts that a member sends to the reducer that this peer checks."""
        found = await self._joined_by("copies", stream, context)
        if found is None:
            return PushReply(refusal=_NO_GROUP)
        (exchange, check), messages = found
        return await check.copy(exchange.ordered_peer_ids.index(context.remote_id), messages)

    async def rpc_count(self, request: CountRequest, context: P2PContext) -> CountReply:
        """Tell the reducer that this peer checks which members may count."""
        try:
            exchange, check = await self._joined_to(request.group_id)
        except TimeoutError:
            return CountReply(refusal=_NO_GROUP)
        if not _checks(exchange, check, context):
            return CountReply(refusal=_NO_GROUP)
        return await check.count(request)

    async def rpc_sign(self, stream: AsyncIterator[AveragingData], context: P2PContext) -> SignReply:
        """Check the sums of the reducer that this peer checks, and sign them."""
        found = await self._joined_by("sums", stream, context)
        if found is None or not _checks(*found[0], context):
            return SignReply(refusal=_NO_GROUP)
        (_, check), messages = found
        return await check.sign(messages)

    async def _joined_by(
        self, what: str, stream: AsyncIterator[AveragingData], context: P2PContext
    ) -> tuple[tuple[PartExchange, PartCheck], AsyncIterator[AveragingData]] | None:
        """The round that the first message of a stream names, and all its messages.

        None for a peer that has such a stream already, or is not in the group.
        """
        with self._waiting.admit(context.remote_id.to_base58(), what, 1) as allowed:
            if not allowed:
                return None
            try:
                async with asyncio.timeout(FIRST_SECONDS):
                    first = await anext(stream)
                joined = await self._joined_to(first.group_id)
            except (TimeoutError, StopAsyncIteration):
                return None
        if context.remote_id not in joined[0].ordered_peer_ids:
            return None
        return joined, achain(as_aiter(first), stream)

    async def _joined_to(self, group_id: bytes) -> tuple[PartExchange, PartCheck]:
        """The round of a group, once this peer has joined it. Raises TimeoutError."""
        async with asyncio.timeout(GROUP_SECONDS):
            while self._round is None or self._round[0].group_id != group_id:
                await self._joined.wait()
        return self._round


def _checks(exchange: PartExchange, check: PartCheck, context: P2PContext) -> bool:
    """Whether this peer checks the caller."""
    return check.checked is not None and exchange.ordered_peer_ids[check.checked] == context.remote_id


def _accusations(
    group: ExchangeGroup, own: int, reduction: Reduction, check: PartCheck
) -> Iterator[Rejection]:
    """What this member tells of others: with the descriptor of each, which names it."""
    for position in reduction.lacks:
        if position == own:
            continue
        is_false = check.found_false and position == check.checked
        yield Rejection(group.descriptors[position], _FALSE if is_false else _LACKS)
    if (checker := reduction.unsigned_by) is not None and checker not in reduction.lacks:
        yield Rejection(group.descriptors[checker], _UNSIGNED)
