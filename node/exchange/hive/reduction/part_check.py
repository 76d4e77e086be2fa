"""One round in a member that checks the sums of another one, and that sends copies of its parts to checkers.

A reducer could send all members the same false sum, or leave out members on purpose. So every part of a
payload goes to the reducer and to its checker. Both count only the members of which both have all parts. The
checker computes each sum again, and signs all of them together if they are right.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import AveragingData
from hivemind.proto.runtime_pb2 import Tensor

from node.exchange.hive.reduction.part_plan import RETRY_SECONDS, PartPlan
from node.exchange.hive.reduction.part_reducer import ReducedPart
from protocol.errors import HetnodeError
from protocol.pb.payload_pb2 import CountReply, CountRequest, PushReply, SignReply
from protocol.reduction.counted_result import mask_of, senders_of
from protocol.reduction.parts import decode_part
from protocol.reduction.stage_reducers import StageReducers
from protocol.server.line import Line
from protocol.trust.envelope import Signer

log = logging.getLogger(__name__)


class PartCheck:
    """What member `own` of a group checks in one round, if anything. Belongs to one event loop.

    Args:
        reducers: keep the same residuals as those of the member that this one checks.
        settling: held while they change.
        sign: with the key of this peer.
        seconds: as in PartExchange.
    """

    def __init__(
        self,
        plan: PartPlan,
        own: int,
        group_id: bytes,
        reducers: StageReducers,
        settling: asyncio.Lock,
        sign: Signer,
        seconds: float,
        line: Line,
    ) -> None:
        self._plan, self._own, self._group_id, self._sign, self._line = plan, own, group_id, sign, line
        self._reducers, self._settling, self._checked = reducers, settling, plan.checked_by(own)
        self._parts = () if self._checked is None else plan.parts[self._checked]
        self._copies: dict[int, list[bytes]] = {}  # of members that have sent all
        self._sending: set[int] = set()
        self._progress = asyncio.Event()
        self._senders_end = asyncio.get_running_loop().time() + seconds / 2
        self._counted: set[int] | None = None  # what the reducer was told
        self.found_false = False

    @property
    def checked(self) -> int | None:
        """The position of the member that this one checks."""
        return self._checked

    async def send_copies(self, sent: Sequence[bytes], stub_of: Callable[[PeerID], Any]) -> None:
        """Send each part of the own payload to the checker of its reducer. What fails is logged.

        Args:
            sent: the own payload, cut into all parts of the plan in their order.
        """
        await asyncio.gather(
            *(
                self._send_copy(checker, copies, stub_of)
                for checker, copies in zip(self._plan.checkers, self._plan.by_reducer(sent), strict=True)
                if checker is not None and copies
            )
        )

    async def _send_copy(self, checker: int, copies: list[bytes], stub_of: Callable[[PeerID], Any]) -> None:
        if checker == self._own:
            self._hold(self._own, copies)
            return

        async def messages() -> AsyncIterator[AveragingData]:
            for copy in copies:
                await self._line.up.take(len(copy))
                yield AveragingData(group_id=self._group_id, tensor_part=Tensor(buffer=copy))

        peer, clock = self._plan.members[checker], asyncio.get_running_loop().time
        while True:
            try:
                reply = await stub_of(peer).rpc_copy(messages())
            except Exception as error:  # hivemind and its transport raise many kinds
                if clock() > self._senders_end - RETRY_SECONDS:
                    log.warning("%s has no copies of the own parts: %s", peer, error)
                    return
            else:
                if reply.refusal:
                    log.warning("%s has not taken copies of the own parts: %s", peer, reply.refusal[:200])
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def copy(self, sender: int, stream: AsyncIterator[AveragingData]) -> PushReply:
        """Take copies of all parts that the checked member gets from a sender."""
        if sender in self._sending or sender in self._copies or not self._parts:
            return PushReply(refusal="this peer takes no such copies from you now")
        self._sending.add(sender)
        copies = []
        try:
            for part in self._parts:
                data = (await anext(stream)).tensor_part.buffer
                await self._line.down.take(len(data))
                await asyncio.to_thread(decode_part, self._plan.layout, part, data)
                copies.append(bytes(data))
            if not await _is_over(stream):
                return PushReply(refusal="these are too many parts")
        except StopAsyncIteration:
            return PushReply(refusal="parts are missing")
        except HetnodeError as error:
            return PushReply(refusal=error.cause[:200])
        finally:
            self._sending.discard(sender)
        self._hold(sender, copies)
        return PushReply()

    async def count(self, request: CountRequest) -> CountReply:
        """Agree with the checked member on the senders that count, once all have sent copies or are late."""
        try:
            async with asyncio.timeout_at(self._senders_end):
                while len(self._copies) < len(self._plan.members):
                    await self._progress.wait()
        except TimeoutError:
            pass
        if self._counted is not None:
            return CountReply(refusal="the senders are counted already")
        weights, members = self._plan.weights, len(self._plan.members)
        try:
            asked = senders_of(request.senders, members)
        except ValueError as error:
            return CountReply(refusal=f"{error}")
        counted = {sender for sender in asked if sender in self._copies}
        # Else a reducer could leave out members on purpose.
        if 2 * math.fsum(weights[sender] for sender in counted) <= math.fsum(weights):
            return CountReply(refusal="too few members have sent all parts to both")
        self._counted = counted
        since = self._reducers.since
        if since != request.since:
            self._reducers.clear()
        return CountReply(senders=mask_of(sorted(counted), members), since=since)

    async def sign(self, stream: AsyncIterator[AveragingData]) -> SignReply:
        """Check all sums of the checked member, and sign them."""
        assert self._checked is not None, "the caller is the checked member"
        reducer = self._plan.members[self._checked].to_base58()
        if self._counted is None:
            return SignReply(refusal="the senders are not counted yet")
        answers, reduced = [], []
        try:
            for part in self._parts:
                data = bytes((await anext(stream)).tensor_part.buffer)
                await self._line.down.take(len(data))
                reduced.append(await asyncio.to_thread(self._plan.read_answer, part, data))
                answers.append(data)
            if not await _is_over(stream):
                return SignReply(refusal="these are too many sums")
        except StopAsyncIteration:
            return SignReply(refusal="sums are missing")
        except HetnodeError as error:
            return self._refused(reducer, error.cause)
        async with self._settling:
            problem = await asyncio.to_thread(self._problem, reducer, reduced)
        if problem:
            return self._refused(reducer, problem)
        return SignReply(
            signature=self._sign(self._plan.sums_message(self._group_id, self._checked, answers))
        )

    def _problem(self, reducer: str, reduced: Sequence[ReducedPart]) -> str:
        """Why the sums are not signed; "" if they are right."""
        reducers = self._reducers.for_parts(self._parts, reducer)
        for number, (own, part) in enumerate(zip(reducers, reduced, strict=True)):
            if set(part.senders) != self._counted:
                return f"sum {number} counts other members than were agreed"
            copies = [self._copies[sender][number] for sender in part.senders]
            try:
                is_right = own.check(copies, [self._plan.weights[each] for each in part.senders], part.data)
            except HetnodeError as error:
                return f"sum {number} cannot be: {error.cause}"
            if not is_right:
                return f"sum {number} is not the sum of what the members have sent"
        return ""

    def _refused(self, reducer: str, problem: str) -> SignReply:
        log.warning("the sums of %s are false: %s", reducer, problem)
        self.found_false = True
        self._reducers.abort()
        return SignReply(refusal=problem[:200])

    def _hold(self, sender: int, copies: list[bytes]) -> None:
        self._copies[sender] = copies
        self._progress.set()
        self._progress = asyncio.Event()


async def _is_over(stream: AsyncIterator[AveragingData]) -> bool:
    """Whether the stream ends here. An answer before its end would break it for the sender."""
    async for _ in stream:
        return False
    return True
