"""A transport that outlives its processes: when one of them dies, they are started again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from node.hive.transport import HivemindTransport
from node.transport.backoff import pause_after
from node.transport.transport import CheckpointDownload, ExchangeResult, HostedStages, RoundEnd, Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.admitted_sources import EVERYONE
from protocol.spec.run import RunSpec
from protocol.trust.multiaddress import tcp_place
from protocol.types import ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId, PeerRecord, Verdict

T = TypeVar("T")

log = logging.getLogger(__name__)

Begin = Callable[[int], Awaitable[HivemindTransport]]
"""Starts the processes on a port; 0 takes a free one."""

_PATIENCE_SECONDS = 60.0
"""How long a call waits for processes that are being started."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_HEALTHY_SECONDS = 60.0
_LEAST_SECONDS = 1.0


_Admitted = tuple[Collection[PeerId], Collection[PeerId], Collection[str], Collection[PeerId] | None]
"""The arguments of :meth:`Transport.admit`."""


class LastingTransport(Transport):
    """A :class:`HivemindTransport` that is replaced when its processes have died.

    Its peer id and its port stay. The new processes get the stages, the allow list and the record of the old
    ones, and serve the payloads that are on the disk. A call that the death interrupts is made again. If the
    processes cannot be started within a minute, a call fails as if the network were away: it raises
    DHT_UNREACHABLE or STATE_UNAVAILABLE, and an exchange has no result. The attempts go on until
    :meth:`close`.
    """

    def __init__(self, begin: Begin, current: HivemindTransport) -> None:
        self._begin, self._current = begin, current
        self._loop = asyncio.get_running_loop()
        self._port = _port_of(current.addresses)
        self._hosted: HostedStages | None = None
        self._arbiter: tuple[RunSpec, Path] | None = None
        self._admitted: _Admitted | None = None
        self._published: tuple[PeerRecord, float] | None = None  # the record, and its end on the loop's clock
        self._is_outdated = False  # a restart was asked for while `begin` ran
        self._ready = asyncio.Event()
        self._ready.set()
        self._keeper = asyncio.create_task(self._keep(), name="hivemind-keeper")

    @classmethod
    async def start(cls, begin: Begin, port: int) -> LastingTransport:
        """Start the processes on `port`. Raises what `begin` raises: the first start is not tried again."""
        return cls(begin, await begin(port))

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._current.addresses

    @property
    def arbiter(self) -> LastingTransport | None:
        """This transport if it arbitrates contested payloads."""
        return self if self._arbiter is not None else None

    @property
    def port(self) -> int:
        """The port on which others reach this peer; 0 if it only dials."""
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the present host."""
        return self._current.pid

    async def restart(self) -> None:
        """Replace the processes: the new ones announce the address that `begin` gives them by now."""
        self._is_outdated = True
        self._ready.clear()
        await self._current.close()

    async def host_stages(self, hosted: HostedStages) -> None:
        await self._call(lambda current: current.host_stages(hosted), ErrorCode.HIVEMIND_DIED)
        self._hosted = hosted

    async def host_arbiter(self, spec: RunSpec, folder: Path) -> None:
        """See :meth:`HivemindTransport.host_arbiter`."""
        await self._call(lambda current: current.host_arbiter(spec, folder), ErrorCode.HIVEMIND_DIED)
        self._arbiter = (spec, folder)

    async def arbitrate(
        self, descriptor: PayloadDescriptor, sources: Sequence[PeerId], deadline: float
    ) -> Verdict:
        """See :meth:`node.transport.arbiter.Arbiter.arbitrate`."""
        return await self._call(
            lambda current: current.arbitrate(descriptor, sources, deadline), ErrorCode.PAYLOAD_UNAVAILABLE
        )

    async def forget_payloads(self, before_round: int) -> None:
        """See :meth:`HivemindTransport.forget_payloads`."""
        await self._call(lambda current: current.forget_payloads(before_round), ErrorCode.PAYLOAD_UNAVAILABLE)

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = EVERYONE,
        members: Collection[PeerId] | None = None,
    ) -> None:
        self._admitted = admitted = (peers, banned, sources, members)
        await self._call(lambda current: current.admit(*admitted), ErrorCode.DHT_UNREACHABLE)

    async def disconnect(self, peers: Collection[PeerId]) -> None:
        """See :meth:`HivemindTransport.disconnect`."""
        await self._call(lambda current: current.disconnect(peers), ErrorCode.DHT_UNREACHABLE)

    async def contact(self, addresses: Mapping[str, str]) -> None:
        """See :meth:`HivemindTransport.contact`. Processes that are started again must be told again."""
        await self._call(lambda current: current.contact(addresses), ErrorCode.DHT_UNREACHABLE)

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        self._published = (record, self._loop.time() + ttl)
        await self._call(lambda current: current.publish(record, ttl), ErrorCode.DHT_UNREACHABLE)

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        return await self._call(lambda current: current.lookup(), ErrorCode.DHT_UNREACHABLE)

    async def exchange(
        self,
        payload: bytes,
        descriptor: PayloadDescriptor,
        group: ExchangeGroup | None,
        *,
        expected: int,
        deadline: float,
    ) -> ExchangeResult:
        ends = self._loop.time() + deadline

        async def exchange(current: HivemindTransport) -> ExchangeResult:
            # The other members do not wait longer for a member that has started again.
            remaining = max(_LEAST_SECONDS, ends - self._loop.time())
            return await current.exchange(payload, descriptor, group, expected=expected, deadline=remaining)

        try:
            return await self._call(exchange, ErrorCode.STATE_UNAVAILABLE)
        except HetnodeError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise
            log.warning("round %d is lost for this node: %s", descriptor.round_number, error)
            return ExchangeResult(())

    async def end_round(self, ended: RoundEnd) -> None:
        try:
            await self._call(lambda current: current.end_round(ended), ErrorCode.STATE_UNAVAILABLE)
        except HetnodeError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise  # new processes have no residuals, so they have nothing to settle

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> bytes:
        return await self._call(
            lambda current: current.fetch_payload(entry, deadline), ErrorCode.STATE_UNAVAILABLE
        )

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        await self._call(
            lambda current: current.fetch_checkpoint(download, deadline), ErrorCode.STATE_UNAVAILABLE
        )

    async def wait_closed(self) -> None:
        await asyncio.wait({self._keeper})

    async def close(self) -> None:
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        await self._current.close()

    async def _call(self, call: Callable[[HivemindTransport], Awaitable[T]], code: ErrorCode) -> T:
        """The answer of the present processes, or of those that replace them.

        Raises HetnodeError as `call` does; `code` if the processes do not live long enough to answer.
        """
        ends = self._loop.time() + _PATIENCE_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    await self._ready.wait()
            except TimeoutError:
                break
            current = self._current
            try:
                return await call(current)
            except HetnodeError as error:
                if error.code is not ErrorCode.HIVEMIND_DIED or self._keeper.done():
                    raise
                if self._current is current:
                    self._ready.clear()
                await current.close()  # all of it: one averager may be dead and the others alive
        raise HetnodeError(
            code,
            f"hivemind's processes have died and do not start again within {_PATIENCE_SECONDS:.0f} s.",
            "See this node's log for the reason; it goes on trying.",
        )

    async def _keep(self) -> None:
        failures = 0
        while True:
            started = self._loop.time()
            await self._current.wait_closed()
            died = self._loop.time()
            self._ready.clear()
            log.warning("a process of hivemind has ended: starting all of them again")
            if died - started > _HEALTHY_SECONDS:
                failures = 0
            while True:
                if failures:  # processes that die at once must not take the whole machine
                    pause = pause_after(failures, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                failures += 1
                if await self._replace():
                    break
            self._ready.set()
            log.info("hivemind's processes run again after %.1f s", self._loop.time() - died)

    async def _replace(self) -> bool:
        """Try once to start new processes in the place of the present ones."""
        await self._current.close()
        self._is_outdated = False
        try:
            self._current = await self._begin(self._port)
            if self._hosted is not None:
                if self._admitted is not None:  # before the first call of another peer
                    await self._current.admit(*self._admitted)
                await self._current.host_stages(self._hosted)
            if self._arbiter is not None:
                await self._current.host_arbiter(*self._arbiter)
            if self._admitted is not None:
                await self._current.admit(*self._admitted)
        except (HetnodeError, OSError, RuntimeError) as error:
            log.error("hivemind's processes cannot be started again yet: %s", error)
            return False
        if self._is_outdated:
            return False
        if self._published is not None and self._published[1] > self._loop.time():
            record, ends = self._published
            with suppress(HetnodeError):  # the directory publishes it again before it expires
                await self._current.publish(record, ends - self._loop.time())
        return True


def _port_of(addresses: Collection[str]) -> int:
    """The TCP port in a multiaddress of this peer; 0 if it has none."""
    return next((place[1] for place in map(tcp_place, addresses) if place), 0)
