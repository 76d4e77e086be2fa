"""The transport with hivemind, as the main process sees it: it outlives its processes.

It never imports hivemind or torch. Every call has a deadline, and every failure is raised as a HetnodeError.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.checkpoint.download import CheckpointDownload
from node.exchange.hive.calls import (
    Admit,
    ArbitratePayload,
    DialPeers,
    DropConnections,
    EndRound,
    Exchange,
    FetchCheckpoint,
    FetchPayload,
    ForgetPayloads,
    HiveRequest,
    HostArbiter,
    HostStages,
    Lookup,
    Publish,
)
from node.exchange.hive.clock import coordinator_clock
from node.exchange.hive.host_process import HostProcess
from node.exchange.object_source import NO_OBJECTS, ObjectSource
from node.exchange.transport import (
    Enter,
    Entry,
    ExchangeResult,
    RoundEnd,
    ServedStages,
    Transport,
    no_stage,
)
from node.ipc.stored_payload import StoredPayload
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.server.admitted_sources import EVERYONE
from protocol.server.backoff import pause_after
from protocol.server.line import UNLIMITED, Line
from protocol.spec.run import RunSpec
from protocol.trust.host_port import tcp_place
from protocol.types import ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId, Verdict
from protocol.wire.records import open_record, seal_record

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_DHT_SECONDS = 15.0
_LOCAL_SECONDS = 15.0
_PATIENCE_SECONDS = 60.0
"""How long a call waits for processes that are being started."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_HEALTHY_SECONDS = 60.0
_LEAST_SECONDS = 1.0


class HiveTransport(Transport):
    """The processes of hivemind for one peer: the transport of a node, and the coordinator's own peer.

    Create it with :func:`start` or :func:`start_arbiter`. The new processes get the stages, the allow list
    and the record of those that have died, and serve the payloads that are on the disk. The attempts to start
    them go on until :meth:`close`.
    """

    def __init__(
        self,
        identity: Identity,
        enter: Enter,
        line: Line,
        host: HostProcess,
        entry: Entry,
        objects: ObjectSource = NO_OBJECTS,
    ) -> None:
        self._identity, self._enter, self._line, self._objects = identity, enter, line, objects
        self._host, self._entry, self._now = host, entry, coordinator_clock(entry.clock_offset)
        self._authority = x509.load_pem_x509_certificate(entry.authority.read_bytes())
        self.port = next((place[1] for place in map(tcp_place, host.addresses) if place), 0)
        self._clock = asyncio.get_running_loop().time
        # What new processes are told again:
        self._hosted: HostStages | None = None
        self._arbiter: HostArbiter | None = None
        self._admitted: Admit | None = None
        self._published: tuple[PeerRecord, float] | None = None  # the record, and its end on the loop's clock
        self._is_outdated = False  # a restart was asked for while processes were being started
        self._ready = asyncio.Event()
        self._ready.set()
        self._keeper = asyncio.create_task(self._keep(), name="transport-keeper")

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._host.addresses

    @property
    def pid(self) -> int:
        """Process id of the present host."""
        return self._host.pid

    @property
    def arbiter(self) -> HiveTransport | None:
        """This transport if it arbitrates contested payloads."""
        return self if self._arbiter is not None else None

    async def restart(self) -> None:
        self._is_outdated = True
        self._ready.clear()
        await self._host.close()

    async def host_stages(self, hosted: ServedStages) -> None:
        absolute = replace(
            hosted,
            payload_folder=hosted.payload_folder.absolute(),  # the host may have another working directory
            checkpoint_folder=hosted.checkpoint_folder.absolute(),
            initial_folder=hosted.initial_folder and hosted.initial_folder.absolute(),
        )
        request = HostStages(absolute, deadline=_START_SECONDS)
        await self._call(request, ErrorCode.TRANSPORT_DIED)
        self._hosted = request

    async def host_arbiter(self, spec: RunSpec, folder: Path) -> None:
        """Fetch and serve contested payloads of the run from now on; the allow list may call. Call it once.

        Args:
            folder: keeps the payloads of a few rounds, also over a restart. Created if necessary.
        """
        request = HostArbiter(spec, folder.absolute(), deadline=_START_SECONDS)
        await self._call(request, ErrorCode.TRANSPORT_DIED)
        self._arbiter = request

    async def arbitrate(
        self, descriptor: PayloadDescriptor, donors: Sequence[PeerId], deadline: float
    ) -> Verdict:
        request = ArbitratePayload(descriptor, tuple(donors), deadline=deadline)
        return await self._call(request, ErrorCode.PAYLOAD_UNAVAILABLE)

    async def forget_payloads(self, before_round: int) -> None:
        await self._call(ForgetPayloads(before_round, deadline=_LOCAL_SECONDS), ErrorCode.PAYLOAD_UNAVAILABLE)

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = EVERYONE,
        members: Collection[PeerId] | None = None,
    ) -> None:
        self._admitted = request = Admit(
            tuple(sorted(set(peers) - set(banned))),  # a plan may still name a peer that was banned since
            tuple(sorted(banned)),
            tuple(sources),
            None if members is None else tuple(sorted(set(members) - set(banned))),
            deadline=_LOCAL_SECONDS,
        )
        await self._call(request, ErrorCode.DHT_UNREACHABLE)

    async def disconnect(self, peers: Collection[PeerId]) -> None:
        request = DropConnections(tuple(sorted(peers)), deadline=_LOCAL_SECONDS)
        await self._call(request, ErrorCode.DHT_UNREACHABLE)

    async def contact(self, addresses: Mapping[str, str]) -> None:
        await self._call(DialPeers(addresses, deadline=_LOCAL_SECONDS), ErrorCode.DHT_UNREACHABLE)

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        self._published = (record, self._clock() + ttl)
        await self._call(self._sealed(record, ttl), ErrorCode.DHT_UNREACHABLE)

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        found = await self._call(Lookup(deadline=_DHT_SECONDS), ErrorCode.DHT_UNREACHABLE)
        records = {}
        for peer, sealed in found.items():
            try:
                opened = open_record(sealed, self._entry.run, peer, self._authority, self._now())
            except HetnodeError as error:
                log.debug("ignored a DHT record of %s: %s", peer, error)
            else:
                records[PeerId(peer)] = opened.record
        return records

    async def exchange(
        self,
        payload: bytes,
        descriptor: PayloadDescriptor,
        group: ExchangeGroup | None,
        *,
        expected: int,
        deadline: float,
    ) -> ExchangeResult:
        ends = self._clock() + deadline
        lent = None if group is None else await self._objects.of_exchange(descriptor, group)
        request = Exchange(descriptor.stage, payload, descriptor, group, expected, lent, deadline=deadline)
        try:
            # The other members do not wait longer for a member that has started again.
            return await self._call(request, ErrorCode.STATE_UNAVAILABLE, ends=ends)
        except HetnodeError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise
            log.warning("round %d is lost for this node: %s", descriptor.round_number, error)
            return ExchangeResult(())

    async def end_round(self, ended: RoundEnd) -> None:
        try:
            request = EndRound(ended.stage, ended, deadline=_LOCAL_SECONDS)
            await self._call(request, ErrorCode.STATE_UNAVAILABLE)
        except HetnodeError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise  # new processes have no residuals, so they have nothing to settle

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> StoredPayload:
        # The averager of its stage may already have it; any other averager can fetch it from its holders.
        averager = self._averager(entry.descriptor.stage, ErrorCode.PAYLOAD_UNAVAILABLE)
        is_here = entry.holders == (self._identity.peer,)
        lent = None if is_here else await self._objects.of_payload(entry.descriptor)
        request = FetchPayload(averager, entry, lent, deadline=deadline)
        return await self._call(request, ErrorCode.STATE_UNAVAILABLE)

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        averager = self._averager(download.record.stage, ErrorCode.STATE_UNAVAILABLE)
        download = replace(download, into=download.into.absolute())
        lent = await self._objects.of_part(download.record)
        request = FetchCheckpoint(averager, download, lent, deadline=deadline)
        await self._call(request, ErrorCode.STATE_UNAVAILABLE)

    async def wait_closed(self) -> None:
        await asyncio.wait({self._keeper})

    async def close(self) -> None:
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        await self._host.close()

    def _averager(self, stage: int, code: ErrorCode) -> int:
        """The stage of an averager of this node, which alone can call other averagers: `stage` if it can be.

        Raises HetnodeError `code` if there is none.
        """
        if self._hosted is None or not (stages := self._hosted.hosted.capacities):
            raise no_stage(code)
        return stage if stage in stages else next(iter(stages))

    def _sealed(self, record: PeerRecord, ttl: float) -> Publish:
        shown = x509.load_pem_x509_certificate(self._entry.certificate.read_bytes())
        certificate, expires = shown.public_bytes(Encoding.DER), self._now() + ttl
        sealed = seal_record(record, self._entry.run, self._identity.sign, expires, certificate)
        return Publish(self._identity.peer, sealed, expires, deadline=_DHT_SECONDS)

    async def _call(self, request: HiveRequest[Answer], code: ErrorCode, ends: float | None = None) -> Answer:
        """The answer of the present processes, or of those that replace them, before `ends`.

        Raises the HetnodeError of the host; `code` if the processes do not live long enough to answer.
        """
        gives_up = self._clock() + _PATIENCE_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(gives_up):
                    await self._ready.wait()
            except TimeoutError:
                break
            host = self._host
            if ends is not None:
                request = replace(request, deadline=max(_LEAST_SECONDS, ends - self._clock()))
            try:
                return await host.call(request)
            except HetnodeError as error:
                if error.code is not ErrorCode.TRANSPORT_DIED or self._keeper.done():
                    raise
                if self._host is host:
                    self._ready.clear()
                await host.close()  # all of it: one averager may be dead and the others alive
        raise HetnodeError(
            code,
            f"hivemind's processes have died and do not start again within {_PATIENCE_SECONDS:.0f} s.",
            "See this node's log for the reason; it goes on trying.",
        )

    async def _keep(self) -> None:
        failures = 0
        while True:
            started = self._clock()
            await self._host.wait_closed()
            died = self._clock()
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
            log.info("hivemind's processes run again after %.1f s", self._clock() - died)

    async def _enter_again(self) -> Entry:
        entry = await self._enter()
        return entry if entry.listen_port else replace(entry, listen_port=self.port)

    async def _replace(self) -> bool:
        """Try once to start new processes in the place of the present ones."""
        await self._host.close()
        self._is_outdated = False
        try:
            self._host, self._entry = await _entered(self._identity, self._enter_again, self._line)
            self._now = coordinator_clock(self._entry.clock_offset)
            # The allow list comes first: other peers may call at once.
            for request in (self._admitted, self._hosted, self._arbiter, self._admitted):
                if request is not None:
                    await self._host.call(request)
        except (HetnodeError, OSError, RuntimeError) as error:
            log.error("hivemind's processes cannot be started again yet: %s", error)
            return False
        if self._is_outdated:
            return False
        if self._published is not None and self._published[1] > self._clock():
            record, ends = self._published
            with suppress(HetnodeError):  # the directory publishes it again before it expires
                await self._host.call(self._sealed(record, ends - self._clock()))
        return True


async def _entered(identity: Identity, enter: Enter, line: Line) -> tuple[HostProcess, Entry]:
    """A host in the DHT. It is there before `enter` gives the port up on which it will listen."""
    host = await HostProcess.start(line)
    try:
        entry = await enter()
        await host.join(identity, entry)
    except BaseException:  # also a cancellation must leave no process behind
        await host.close()
        raise
    return host, entry


async def start(
    identity: Identity, enter: Enter, line: Line = UNLIMITED, objects: ObjectSource = NO_OBJECTS
) -> HiveTransport:
    """See :meth:`node.exchange.transport.TransportPackage.start`."""
    return HiveTransport(identity, enter, line, *await _entered(identity, enter, line), objects)


async def start_arbiter(identity: Identity, enter: Enter, spec: RunSpec, folder: Path) -> HiveTransport:
    """See :meth:`node.exchange.transport.TransportPackage.start_arbiter`."""
    peer = await start(identity, enter)
    try:
        await peer.host_arbiter(spec, folder)
    except BaseException:
        await peer.close()
        raise
    return peer
