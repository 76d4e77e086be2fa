"""The store as one more source of payloads in the exchanges of a stage.

Every member uploads its payload once, and the others read it there: a slow uplink sends one copy. They wait
for the store only as long as the lines of the group make likely, then ask peers as without a store, and take
what comes first. An owner whose payload was not there in time is not waited for in the next rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

from node.checkpoint.download import TransferError, WrongBytes
from node.exchange.object_client import ObjectClient
from node.exchange.object_source import LentPayloads
from node.exchange.transfer import NotHeld, check_hash
from protocol.types import ExchangeGroup, PayloadDescriptor, PeerId

log = logging.getLogger(__name__)

_SHARE = 0.25
"""Of the time to gather, in which peers are not asked yet. Those that help need the next quarter."""
_TIMES, _LEAST_SECONDS = 3.0, 3.0
"""If that is shorter: this multiple of what upload and download take, at these least."""
_REMEMBERED_ROUNDS = 8
"""So long an owner is not waited for whose payload was not in the store in time."""
_TRIES = 3
"""Failures in a row after which the store is left alone for a payload. That it has none yet is no failure."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0
_MOST_AT_ONCE = 16  # downloads of one member
_PEERS_FIRST_SECONDS = 3.0
"""Head start of the holders of a committed payload. Nearly always they have it, and are nearer."""
_READ_SECONDS = 3.0
"""How long the others have to read a payload that is in the store before it is also pushed to one of them."""

Hold = Callable[[PayloadDescriptor, bytes], Awaitable[object]]
Holds = Callable[[PayloadDescriptor], bool]


def seconds_to_wait(
    own: PayloadDescriptor, owner: PeerId, group: ExchangeGroup | None, seconds: float
) -> float:
    """How long the owner of `own` waits for the payload of `owner` from the store before it asks peers.

    `seconds` are those of the whole exchange.
    """
    most = _SHARE * seconds
    owners = [] if group is None else [each.owner for each in group.descriptors]
    if group is None or not group.lines or not {owner, own.owner} <= set(owners):
        return most
    lines = dict(zip(owners, group.lines, strict=True))
    uplink, downlink = lines[owner].uplink, lines[own.owner].downlink
    if not uplink:
        return most
    takes = own.nbytes / uplink + (own.nbytes * (len(owners) - 1) / downlink if downlink else 0.0)
    return min(most, max(_LEAST_SECONDS, _TIMES * takes))


class ObjectExchange:
    """The store in the exchanges of one member. Belongs to one event loop."""

    def __init__(self, client: ObjectClient, hold: Hold, holds: Holds) -> None:
        self._client, self._hold, self._holds = client, hold, holds
        self._missed: dict[PeerId, int] = {}  # by owner, the last round
        self._uploading: asyncio.Task[bool] | None = None
        self._works = True  # whether the newest request had an answer, for the log
        self._at_once = asyncio.Semaphore(_MOST_AT_ONCE)

    @asynccontextmanager
    async def gathering(
        self,
        own: PayloadDescriptor,
        read: Callable[[], bytes | None],
        others: Collection[PayloadDescriptor],
        lent: LentPayloads | None,
    ) -> AsyncIterator[Callable[[PayloadDescriptor, float], Awaitable[None]]]:
        """Upload the own payload, which `read` gives, and download those of `others` inside this block.

        Yields what waits so many seconds, or until it is clear that they do not help, for one of the others.
        The upload goes on after the block, which it would delay, until the next one begins.
        """
        if self._uploading is not None:
            self._uploading.cancel()
            self._uploading = None
        if lent is None:
            yield _nothing
            return
        if lent.urls.put:
            self._uploading = asyncio.create_task(self._upload(own, read, lent))
        tasks = {each.owner: asyncio.create_task(self._fetch(each, lent)) for each in others}

        async def wait(wanted: PayloadDescriptor, seconds: float) -> None:
            last = self._missed.get(wanted.owner)
            if last is None or own.round_number - last > _REMEMBERED_ROUNDS:
                await asyncio.wait({tasks[wanted.owner]}, timeout=seconds)
                if not self._holds(wanted):
                    self._missed[wanted.owner] = own.round_number
                    self._note_failure(f"the store had no payload of {wanted.owner} within {seconds:.1f} s")

        try:
            yield wait
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    @asynccontextmanager
    async def beside_holders(
        self, wanted: PayloadDescriptor, lent: LentPayloads | None
    ) -> AsyncIterator[None]:
        """Download a committed payload inside this block if its holders do not send it at once."""
        if lent is None:
            yield
            return
        task = asyncio.create_task(self._fetch(wanted, lent, _PEERS_FIRST_SECONDS))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def is_spread(self, seconds: float) -> bool:
        """Whether the own payload is in the store within `seconds`, and the others had time to read it."""
        if self._uploading is None:
            return False
        await asyncio.wait({self._uploading}, timeout=seconds)
        if not (self._uploading.done() and not self._uploading.cancelled() and self._uploading.result()):
            return False
        await asyncio.sleep(_READ_SECONDS)
        return True

    async def _upload(
        self, own: PayloadDescriptor, read: Callable[[], bytes | None], lent: LentPayloads
    ) -> bool:
        payload, pause = await asyncio.to_thread(read), _FIRST_PAUSE
        if payload is None:
            return False  # the disk has lost it since the exchange began
        for _ in range(_TRIES):
            try:
                await self._client.put(lent.urls.put, payload, own.sha256, lent.nearest)
            except TransferError as error:
                self._note_failure(str(error))
                await asyncio.sleep(pause)
                pause *= 2
            else:
                self._works = True
                return True
        return False

    async def _fetch(self, wanted: PayloadDescriptor, lent: LentPayloads, delay: float = 0.0) -> None:
        """Hold the payload as soon as the store has it. Returns if the store fails again and again."""
        await asyncio.sleep(delay)
        url, failures, pause = lent.get_url(wanted.sha256), 0, _FIRST_PAUSE
        while url and failures < _TRIES and not self._holds(wanted):
            try:
                async with self._at_once:
                    payload = await self._client.get(url, wanted.nbytes, lent.nearest)
                await check_hash(payload, wanted)
                await self._hold(wanted, payload)
                self._missed.pop(wanted.owner, None)
                self._works = True
                return
            except NotHeld:
                self._works, failures = True, 0
            except WrongBytes as error:
                # Nobody is blamed: whoever has the URL of an upload, or the store, may have written them.
                log.warning("the store has other bytes than the payload of %s: %s", wanted.owner, error)
                return
            except TransferError as error:
                failures += 1
                self._note_failure(str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _note_failure(self, what: str) -> None:
        log.log(logging.WARNING if self._works else logging.DEBUG, "%s; peers are asked instead", what)
        self._works = False


async def _nothing(_: PayloadDescriptor, __: float) -> None:
    """Without a store there is nothing to wait for."""
