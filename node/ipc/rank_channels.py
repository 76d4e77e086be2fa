"""The processes of a peer with several ranks, as one worker: each call goes to all, and rank 0 answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from node.ipc.channel import StreamChannel
from protocol.errors import ErrorCode, HetnodeError, cause_of
from protocol.wire.typed_calls import Call, Reply

_END_SECONDS = 5.0
"""Until the end of a process is known, after the others have lost it."""


class RankChannels:
    """The ranks of a peer, as :class:`node.ipc.worker_client.Channel`.

    A call that fails on any rank raises the reason: the end of a rank's process, if one has ended; else the
    first rank's error. It raises RANK_FAILED if the others then do not answer, because they wait for a rank
    that has given up.

    Args:
        patience: seconds for the other ranks, once one has failed: they fail for the same reason, or wait for
            it in vain.
    """

    def __init__(self, ranks: Sequence[StreamChannel], patience: float = 60.0) -> None:
        self.ranks, self._patience = ranks, patience

    def call(self, call: Call) -> Awaitable[Reply]:
        """Queue a call at all ranks and return the future of rank 0's reply."""
        # All in one turn of the event loop, so that the ranks get all calls in the same order.
        replies: list[asyncio.Future[Reply]] = []
        for rank in self.ranks:
            reply = asyncio.ensure_future(rank.call(call))
            reply.add_done_callback(_take_note)
            replies.append(reply)
        answer = asyncio.ensure_future(self._answer(replies))
        answer.add_done_callback(_take_note)
        return answer

    async def wait_closed(self) -> None:
        """Return when one of the ranks has ended."""
        waiting = [asyncio.ensure_future(rank.wait_closed()) for rank in self.ranks]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    async def close(self, grace: float) -> None:
        """End all ranks, at the same time."""
        await asyncio.gather(*(rank.close(grace) for rank in self.ranks))

    async def _answer(self, replies: Sequence[asyncio.Future[Reply]]) -> Reply:
        done, _ = await asyncio.wait(replies, return_when=asyncio.FIRST_EXCEPTION)
        if any(reply.exception() for reply in done):
            raise await self._failure(replies)
        return replies[0].result()

    async def _failure(self, replies: Sequence[asyncio.Future[Reply]]) -> BaseException:
        """Why a call has failed on at least one rank."""
        # The end of a process answers its open calls, too.
        done, waiting = await asyncio.wait(replies, timeout=self._patience)
        failures = [failure for reply in replies if reply in done and (failure := reply.exception())]
        causes = [failure for failure in failures if not _follows(failure)]
        if not causes:  # the others have noticed first that a rank has gone
            await asyncio.wait({asyncio.ensure_future(self.wait_closed())}, timeout=_END_SECONDS)
        if ends := [rank.end for rank in self.ranks if rank.end is not None]:
            return ends[0]
        cause = (causes or failures)[0]
        return _stuck(cause) if waiting else cause


def _follows(failure: BaseException) -> bool:
    """Whether a rank has failed only because another one has."""
    return isinstance(failure, HetnodeError) and failure.code is ErrorCode.RANK_FAILED


def _stuck(cause: BaseException) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RANK_FAILED,
        f"A rank of this peer has failed while others wait for it: {cause_of(cause)}",
        "See the end of this node's log, then start the node again: it continues from its checkpoint.",
    )


def _take_note(reply: asyncio.Future[Reply]) -> None:
    # A caller that was cancelled, or has got another rank's error, is not owed a warning.
    if not reply.cancelled():
        reply.exception()
