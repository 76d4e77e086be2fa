"""The exchange of payloads in a stage: decides which peer is asked for which payload, when, and how often.

It is independent of a library: a transport implements :class:`node.exchange.payload_calls.PayloadCalls`, and
answers the calls of other peers with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from node.checkpoint.download import TransferError, WrongBytes, list_reasons
from node.exchange.arrivals import Arrival
from node.exchange.helpers import Helpers, HelpFailures, helpers_of
from node.exchange.object_client import ObjectClient
from node.exchange.object_exchange import ObjectExchange, seconds_to_wait
from node.exchange.object_source import LentPayloads
from node.exchange.open_transfers import OpenTransfers
from node.exchange.payload_calls import PayloadCalls
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import (
    RANGES,
    NotHeld,
    chunk_bytes,
    read_in_thread,
)
from node.ipc.stored_payload import StoredPayload
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId

log = logging.getLogger(__name__)
Name = TypeVar("Name", bound=str)

HELP_SECONDS = 3.0  # longest wait of a request for a payload that this peer has to pass on
TURN_SECONDS = 1.0  # longest wait of a request for this peer's own payload; see PayloadExchange.exchange
WAITING_PER_PEER = 2 * RANGES  # requests of one peer that may wait; bounds what it can keep open here
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between two attempts with all holders
_PUSHES = 2  # two holders: one of them may leave before the others have fetched the payload


class PayloadExchange:
    """The payloads of `stage`, each of `capacity` bytes at most, at peer `me`. Belongs to one event loop."""

    def __init__(
        self,
        me: str,
        stage: int,
        capacity: int,
        store: PayloadStore,
        calls: PayloadCalls,
        objects: ObjectClient | None = None,
    ) -> None:
        self._me, self._stage, self._capacity, self._calls = me, stage, capacity, calls
        self._awaited: dict[str, PayloadDescriptor] = {}  # by owner, who may push it
        self._faults: dict[str, str] = {}  # by owner: what was wrong with bytes that the owner itself sent
        self._gathering: tuple[asyncio.Task[object], ...] = ()
        self._round = 0  # of the newest exchange
        self._to_ask: set[str] | None = set()  # owners not asked yet; None while the group is not known
        self._progress = asyncio.Event()  # set and then replaced with each change of these fields
        self._waiting = OpenTransfers()
        self._arrivals: dict[str, Arrival] = {}  # by hash, what arrives now
        self._passed_on = WeakSet[Arrival]()  # which other peers may still read
        self._helpers: Helpers | None = None  # of the newest exchange
        self._help_failures = HelpFailures()
        self._objects = ObjectExchange(objects or ObjectClient(), self.hold, self.holds)
        self.store = store

    @contextmanager
    def exchange(self, round_number: int) -> Iterator[None]:
        """Inside this block other peers get the own payload only after :meth:`gather` has asked for theirs.

        All messages between two peers share one connection. A request behind a payload would wait for the
        whole payload, and an exchange would use the two directions of a link one after the other. So a
        request waits a moment if this peer has not joined the group or has not sent its own requests.
        """
        for arrival in self._passed_on:
            arrival.drop()
        self._advance(round_number, None)
        try:
            yield
        finally:
            self._advance(round_number, set())

    async def gather(
        self,
        own: PayloadDescriptor,
        others: Sequence[PayloadDescriptor],
        seconds: float,
        push: bool,
        group: ExchangeGroup | None = None,
        lent: LentPayloads | None = None,
    ) -> dict[PeerId, str]:
        """Fetch the payloads of `others` into the store; return when all are there or after `seconds`.

        Returns what is wrong by owner, for each owner that itself sent other bytes than it signed. A payload
        that is only missing is no fault of its owner.

        Args:
            own: this peer's payload, which is in the store.
            others: payloads of one (stage, round): one per owner, authentic, within the capacity.
            push: other peers cannot dial this one, so it sends its payload to them.
            group: of the coordinator; its lines tell who helps.
            lent: of the run's object store, which is asked before peers.
        """
        self._faults = {}
        me, members = PeerId(self._me), (own, *others)
        waits = {each.owner: seconds_to_wait(own, each.owner, group, seconds) for each in others if lent}
        later = max(waits.values(), default=0.0)
        helpers = self._helpers = helpers_of(me, group, members, seconds, self._help_failures, later)
        self._awaited = {descriptor.owner: descriptor for descriptor in others}
        owners = [descriptor.owner for descriptor in others]
        reasons: dict[str, dict[str, str]] = {owner: {} for owner in owners}
        self._advance(own.round_number, set(owners))
        read = partial(self.store.get, own.round_number, own.sha256)
        async with self._objects.gathering(own, read, others, lent) as wait:
            work: list[Coroutine[Any, Any, object]] = []
            for each in others:
                # First the owner; every other member of the group may have the payload soon.
                holders = [each.owner, *own_order(set(owners) - {each.owner}, self._me)]
                first_wait = partial(wait, each, waits[each.owner]) if lent else None
                work.append(self._gather_one(first_wait, helpers, each, holders, reasons[each.owner]))
            if push and owners:
                first = [owner for owner in helpers.to_supply() if owner in owners]
                listeners = dict.fromkeys((*first, *own_order(owners, self._me)))
                work.append(self._push(own, tuple(listeners), 1 if first else _PUSHES, later))
            tasks = self._gathering = tuple(asyncio.create_task(each) for each in work)
            try:
                if tasks:
                    await asyncio.wait(tasks, timeout=seconds)
            finally:
                self.break_off()
                await asyncio.gather(*tasks, return_exceptions=True)
        missing = [each for each in others if not self.holds(each)]
        lost = {each.owner for each in missing}
        # A payload that nobody has sent may be its owner's fault.
        failed = [(helper, owner) for helper, owner in helpers.failed if owner not in lost]
        self._help_failures.note(own.round_number, failed)
        for each in missing:
            where = f"stage {each.stage}, round {each.round_number}"
            log.warning("%s: no payload of %s (%s)", where, each.owner, list_reasons(reasons[each.owner]))
        return {each.owner: self._faults[each.owner] for each in missing if each.owner in self._faults}

    def break_off(self) -> None:
        """End :meth:`gather` now, with the payloads that have arrived."""
        for task in self._gathering:
            task.cancel()
        self._gathering = ()

    async def fetch(
        self, entry: ManifestEntry, seconds: float, lent: LentPayloads | None = None
    ) -> StoredPayload:
        """See :meth:`Transport.fetch_payload`. The holders are asked in their order, then the store."""
        descriptor, holders = entry.descriptor, entry.holders
        if descriptor.stage == self._stage and descriptor.nbytes > self._capacity:
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"The payload {descriptor.sha256[:16]} of {descriptor.owner} has {descriptor.nbytes} bytes, "
                f"more than the {self._capacity} that a payload of stage {descriptor.stage} can have.",
                "The coordinator committed a payload that no peer may apply: tell its operator.",
            )
        reasons: dict[str, str] = {}
        try:
            async with asyncio.timeout(seconds), self._objects.beside_holders(descriptor, lent):
                return await self._obtain(descriptor, holders, reasons)
        except TimeoutError:
            raise HetnodeError(
                ErrorCode.PAYLOAD_UNAVAILABLE,
                f"None of {len(holders)} holders sent the payload {descriptor.sha256[:16]} of "
                f"{descriptor.owner} (stage {descriptor.stage}, round {descriptor.round_number}): "
                f"{list_reasons(reasons)}.",
                "Wait for a holder to come back; without this payload the round cannot be applied.",
            ) from None

    @property
    def members(self) -> int:
        """Of the group of the newest exchange, this peer included."""
        return 1 + len(self._awaited)

    def holds(self, descriptor: PayloadDescriptor) -> bool:
        return self.store.has(descriptor.round_number, descriptor.sha256)

    async def hold(self, descriptor: PayloadDescriptor, payload: bytes) -> StoredPayload:
        """Put the payload into the store: on the disk, or in memory if the disk refuses it."""
        kept = await asyncio.to_thread(self.store.put, descriptor.round_number, descriptor.sha256, payload)
        self._note_progress()
        return kept

    def awaits(self, sender: str, descriptor: PayloadDescriptor) -> bool:
        """Whether this peer waits for this payload from its owner, so that the owner may push it."""
        return self._awaited.get(sender) == descriptor

    async def wait_for_turn(self, peer: str, owner: str, round_number: int, sha256: str) -> None:
        """Wait until this peer may send its own payload, TURN_SECONDS at most; see :meth:`exchange`."""
        if owner != self._me:
            return
        with self._waiting.admit(peer, "turn", WAITING_PER_PEER) as allowed, suppress(TimeoutError):
            # The bound guards against a deadlock: two peers could wait for each other's request.
            async with asyncio.timeout(TURN_SECONDS if allowed else 0):
                while self._is_early(round_number, sha256):
                    await self._progress.wait()

    def note_fault(self, descriptor: PayloadDescriptor, sender: str, error: Exception) -> None:
        """Note a fault of the owner of a payload if the owner itself, an authentic peer, sent other bytes."""
        if sender == descriptor.owner and isinstance(error, WrongBytes):
            self._faults[sender] = str(error)

    async def pieces(
        self, peer: str, owner: str, round_number: int, sha256: str
    ) -> AsyncIterator[bytes] | None:
        """The bytes of a payload for `peer`, as they arrive or from the store; None if this peer lacks it.

        Waits HELP_SECONDS at most for a payload that this peer has to pass on to `peer`.
        """
        awaited = self._awaited.get(owner)
        is_awaited = awaited is not None and awaited.sha256 == sha256
        if is_awaited and self._helpers and self._helpers.serves(PeerId(peer), PeerId(owner)):
            with suppress(TimeoutError):
                async with asyncio.timeout(HELP_SECONDS):
                    while sha256 not in self._arrivals and not self.store.has(round_number, sha256):
                        await self._progress.wait()
        size = chunk_bytes(max(RANGES, len(self._awaited)))  # each of these may ask, too
        if sha256 in self._arrivals:
            return self._arrivals[sha256].pieces(size)
        found = await asyncio.to_thread(self.store.pieces, round_number, sha256, size)
        return None if found is None else read_in_thread(found)

    @contextmanager
    def arriving(self, descriptor: PayloadDescriptor) -> Iterator[Arrival]:
        """Pass on what arrives of a payload inside this block, at whose end it is held or has failed."""
        arrivals, sha256 = self._arrivals, descriptor.sha256

        def begin(arrival: Arrival) -> None:
            arrivals.setdefault(sha256, arrival)
            self._passed_on.add(arrival)
            self._note_progress()

        arrival = Arrival(descriptor.nbytes, begin)
        try:
            yield arrival
        finally:
            arrival.end()
            if arrivals.get(sha256) is arrival:
                del arrivals[sha256]

    async def _gather_one(
        self,
        first_wait: Callable[[], Awaitable[None]] | None,
        helpers: Helpers,
        descriptor: PayloadDescriptor,
        holders: Sequence[PeerId],
        reasons: dict[str, str],
    ) -> None:
        """Get the payload from the store, its helpers, its owner or any other member, in this order."""
        if first_wait is not None:
            self._note_asked(descriptor.owner)  # the store has another connection: nobody need wait
            await first_wait()
            if self.holds(descriptor):
                return
        for helper in helpers.to_ask(descriptor.owner):
            if await self._is_helped(helpers, helper, descriptor, reasons):
                return
        await self._obtain(descriptor, holders, reasons)

    async def _is_helped(
        self, helpers: Helpers, helper: PeerId, descriptor: PayloadDescriptor, reasons: dict[str, str]
    ) -> bool:
        """Ask a helper until it has sent the payload, or has failed, or its time is up."""
        place = helpers.place_at(helper)
        pause, was_asked = _FIRST_PAUSE, False
        while helpers.is_usable(helper) and not self.holds(descriptor):
            if place.locked():
                self._note_asked(descriptor.owner)  # requests that come later delay nobody
            async with place:
                was_asked = True
                try:
                    await self._fetch_in_time(helpers, helper, descriptor)
                except NotHeld as error:
                    reasons[helper] = _brief(error)
                except Exception as error:  # a transport's library raises anything here
                    log.info("no help from %s with the payload of %s: %r", helper, descriptor.owner, error)
                    reasons[helper] = _brief(error)
                    if isinstance(error, WrongBytes) or not isinstance(error, TransferError):
                        helpers.give_up(helper)  # else what it passes on has ended, and it may send others
                    break
            if not self.holds(descriptor):
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        self._note_asked(descriptor.owner)
        if was_asked and not self.holds(descriptor):
            helpers.failed.add((helper, descriptor.owner))
        return self.holds(descriptor)

    async def _fetch_in_time(self, helpers: Helpers, helper: PeerId, descriptor: PayloadDescriptor) -> None:
        """Fetch a payload from a helper into the store. Raises TransferError if that takes too long."""
        with self.arriving(descriptor) as arrival:
            when_asked = partial(self._note_asked, descriptor.owner)
            fetching = asyncio.create_task(self._calls.fetch(helper, descriptor, when_asked, arrival))
            try:
                await asyncio.wait({fetching}, timeout=max(0.0, helpers.seconds_left))
                if arrival.seconds_left() < helpers.seconds_to_finish:
                    await asyncio.wait({fetching}, timeout=helpers.seconds_to_finish)
                if not fetching.done():
                    raise TransferError(f"too slow: {len(arrival.data)} of {descriptor.nbytes} bytes")
                payload = await fetching
            finally:
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
            await self.hold(descriptor, payload)

    async def _obtain(
        self, descriptor: PayloadDescriptor, holders: Sequence[str], reasons: dict[str, str]
    ) -> StoredPayload:
        """Ask one holder after the other until one has sent the payload, or until this is cancelled.

        `reasons` receives the reason of each holder that did not send it.
        """
        when_asked = partial(self._note_asked, descriptor.owner)
        pause = _FIRST_PAUSE
        while True:
            for holder in holders or [self._me]:
                # Before each request: the owner may have pushed the payload meanwhile.
                if (held := await self._held(descriptor)) is not None:
                    when_asked()
                    return held
                if holder == self._me:
                    continue
                try:
                    with self.arriving(descriptor) as arrival:
                        payload = await self._calls.fetch(holder, descriptor, when_asked, arrival)
                        return await self.hold(descriptor, payload)
                except Exception as error:  # a transport's library raises anything here
                    log.debug("no payload from %s: %r", holder, error)
                    reasons[holder] = _brief(error)
                    self.note_fault(descriptor, holder, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _held(self, descriptor: PayloadDescriptor) -> StoredPayload | None:
        if not self.holds(descriptor):
            return None
        return await asyncio.to_thread(self.store.find, descriptor.round_number, descriptor.sha256)

    async def _push(self, own: PayloadDescriptor, listeners: Sequence[str], most: int, later: float) -> None:
        """Send the own payload to `most` members of the group, from which the others fetch it.

        If the store has it `later` seconds from now, one of them gets it, which may not reach the store.
        """
        if await self._objects.is_spread(later):
            most = 1
        payload = await asyncio.to_thread(self.store.get, own.round_number, own.sha256)
        if payload is None:
            return  # the disk has lost it since the exchange began
        pause, holders = _FIRST_PAUSE, 0
        while not holders:
            for listener in listeners:
                try:
                    await self._calls.push(listener, own, payload)
                except Exception as error:  # a transport's library raises anything here
                    log.debug("%s did not take the payload: %r", listener, error)
                    continue
                holders += 1
                if holders == most:
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _is_early(self, round_number: int, sha256: str) -> bool:
        # A request of another round is early only if this peer has yet to make that payload.
        if round_number == self._round:
            return self._to_ask is None or bool(self._to_ask)
        return round_number > self._round and not self.store.has(round_number, sha256)

    def _note_asked(self, owner: str) -> None:
        """Note that the payload of `owner` was asked for, or that this is not necessary."""
        if self._to_ask:
            self._advance(self._round, self._to_ask - {owner})

    def _advance(self, round_number: int, to_ask: set[str] | None) -> None:
        self._round, self._to_ask = round_number, to_ask
        self._note_progress()

    def _note_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


def own_order(peers: Iterable[Name], me: str) -> list[Name]:
    """The peers in an order that depends on `me`, so that not every peer asks the same peer first."""
    return sorted(peers, key=lambda peer: hashlib.sha256(f"{me}{peer}".encode()).digest())


def _brief(error: Exception) -> str:
    # A transport may list every address that it has tried, over many lines.
    return " ".join((str(error) or type(error).__name__).split())[:300]
