"""The main process's end of hivemind: DHT records, the exchange of payloads, and the fetching of checkpoints.

It never imports hivemind or torch. Every call has a deadline, and every failure is raised as a HetnodeError.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.hive.calls import (
    Admit,
    ArbitratePayload,
    Contact,
    Disconnect,
    EndRound,
    Exchange,
    FetchCheckpoint,
    FetchPayload,
    ForgetPayloads,
    HiveRequest,
    HostArbiter,
    HostStages,
    JoinDht,
    Lookup,
    Publish,
)
from node.hive.clock import coordinator_time
from node.ipc.channel import Child, start_child
from node.security.identity import Identity
from node.transport.line import UNLIMITED, Line
from node.transport.transport import CheckpointDownload, ExchangeResult, HostedStages, RoundEnd, Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.admitted_sources import EVERYONE
from protocol.spec.run import RunSpec
from protocol.types import ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId, PeerRecord, Verdict
from protocol.wire.records import open_record, seal_record
from protocol.wire.typed_calls import decode_answer, encode_request

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_DHT_SECONDS = 15.0
_LOCAL_SECONDS = 15.0
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 15.0
"""The host counts as dead when it has not answered this many seconds after the deadline."""


class HivemindTransport(Transport):
    """A node's connection to hivemind's network, run by a host process of its own.

    Create it with :meth:`start`. When the host process or one of its children dies, every open and every
    later call raises HIVEMIND_DIED; then the node must be started again.
    """

    def __init__(
        self,
        host: Child,
        folder: Path,
        run: str,
        identity: Identity,
        certificate: Path,
        authority: x509.Certificate,
        clock_offset: float,
    ) -> None:
        self._host, self._folder, self._run, self._identity = host, folder, run, identity
        self._certificate, self._authority, self._clock_offset = certificate, authority, clock_offset
        self._addresses: tuple[str, ...] = ()
        self._stages: tuple[int, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses that other peers can use as `initial_peers`; empty in client mode."""
        return self._addresses

    @classmethod
    async def start(
        cls,
        *,
        identity: Identity,
        certificate: Path,
        authority: Path,
        run: str,
        initial_peers: Sequence[str] = (),
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        advertise: str | None = None,
        advertise_port: int = 0,
        client_mode: bool = False,
        stays_connected: bool = False,
        sources: Collection[str] = EVERYONE,
        members: Collection[PeerId] | None = None,
        clock_offset: float = 0.0,
        line: Line = UNLIMITED,
    ) -> HivemindTransport:
        """Spawn the host and join the DHT.

        Args:
            identity: its key file becomes the libp2p identity, so ``identity.peer`` is the peer id.
            certificate, authority: PEM files; a replaced certificate is read again.
            run: its id, in the DHT's keys, the names of calls and all signatures; has no dots.
            initial_peers: multiaddresses of the DHT to join; empty starts a new one.
            listen_host, listen_port: the interface to listen on, by address or name; port 0 takes a free one.
            advertise, advertise_port: host and port told to other peers; None and 0 are those to listen on.
            client_mode: only dial; else connections are accepted from `sources`, see :meth:`admit`.
            stays_connected: also stay connected to all admitted peers, as in client mode.
            members: the peers whose connections are accepted; None accepts all until they are admitted.
            clock_offset: seconds by which the coordinator's clock is ahead; the DHT needs it right to 3 s.
            line: how fast payloads and checkpoints may be sent and received.

        Raises HetnodeError PORT_IN_USE, BAD_ADDRESS, DHT_UNREACHABLE, HIVEMIND_DIED; leaves nothing behind.
        """
        host, folder = await _start_host(line)
        issuer = x509.load_pem_x509_certificate(authority.read_bytes())
        transport = cls(host, folder, run, identity, certificate, issuer, clock_offset)
        request = JoinDht(
            run=run,
            peer=identity.peer,
            initial_peers=tuple(initial_peers),
            listen_host=listen_host,
            listen_port=listen_port,
            advertise=advertise,
            advertise_port=advertise_port,
            identity=identity.path,
            certificate=certificate,
            authority=authority,
            client_mode=client_mode,
            stays_connected=stays_connected,
            sources=tuple(sources),
            members=None if members is None else tuple(sorted(members)),
            clock_offset=clock_offset,
            folder=folder,
            deadline=_START_SECONDS,
        )
        await transport._join(request)
        return transport

    async def _join(self, request: JoinDht) -> None:
        try:
            joined = await self._call(request)
            assert joined.peer == request.peer, "p2pd and this process derive it from the same key"
        except BaseException:  # also a cancellation must leave no process behind
            await self.close()
            raise
        self._addresses = joined.addresses

    @property
    def pid(self) -> int:
        """Process id of the host."""
        return self._host.pid

    async def host_stages(self, hosted: HostedStages) -> None:
        absolute = replace(
            hosted,
            payload_folder=hosted.payload_folder.absolute(),  # the host may have another working directory
            checkpoint_folder=hosted.checkpoint_folder.absolute(),
            initial_folder=hosted.initial_folder and hosted.initial_folder.absolute(),
        )
        await self._call(HostStages(absolute, deadline=_START_SECONDS))
        self._stages = tuple(hosted.capacities)

    async def host_arbiter(self, spec: RunSpec, folder: Path) -> None:
        """Fetch and serve contested payloads of the run from now on; the allow list may call. Call it once.

        Args:
            folder: keeps the payloads of a few rounds, also over a restart. Created if necessary.
        """
        await self._call(HostArbiter(spec, folder.absolute(), deadline=_START_SECONDS))

    async def arbitrate(
        self, descriptor: PayloadDescriptor, donors: Sequence[PeerId], deadline: float
    ) -> Verdict:
        """See :meth:`node.transport.arbiter.Arbiter.arbitrate`."""
        return await self._call(ArbitratePayload(descriptor, tuple(donors), deadline=deadline))

    async def forget_payloads(self, before_round: int) -> None:
        """Drop the contested payloads of the rounds before `before_round`."""
        await self._call(ForgetPayloads(before_round, deadline=_LOCAL_SECONDS))

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = EVERYONE,
        members: Collection[PeerId] | None = None,
    ) -> None:
        admitted = sorted(set(peers) - set(banned))  # a plan may still name a peer that was banned since
        known = None if members is None else tuple(sorted(set(members) - set(banned)))
        await self._call(
            Admit(tuple(admitted), tuple(sorted(banned)), tuple(sources), known, deadline=_LOCAL_SECONDS)
        )

    async def disconnect(self, peers: Collection[PeerId]) -> None:
        """Close the connections to `peers`, which are dead: the next calls open new ones."""
        await self._call(Disconnect(tuple(sorted(peers)), deadline=_LOCAL_SECONDS))

    async def contact(self, addresses: Mapping[str, str]) -> None:
        """Dial each of these peers at this multiaddress; only with `stays_connected`."""
        await self._call(Contact(addresses, deadline=_LOCAL_SECONDS))

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        expires = coordinator_time(self._clock_offset) + ttl
        shown = x509.load_pem_x509_certificate(self._certificate.read_bytes()).public_bytes(Encoding.DER)
        sealed = seal_record(record, self._run, self._identity.sign, expires, shown)
        await self._call(Publish(self._identity.peer, sealed, expires, deadline=_DHT_SECONDS))

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        found = await self._call(Lookup(deadline=_DHT_SECONDS))
        records = {}
        now = coordinator_time(self._clock_offset)
        for peer, sealed in found.items():
            try:
                records[PeerId(peer)] = open_record(sealed, self._run, peer, self._authority, now).record
            except HetnodeError as error:
                log.debug("ignored a DHT record of %s: %s", peer, error)
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
        return await self._call(
            Exchange(descriptor.stage, payload, descriptor, group, expected, deadline=deadline)
        )

    async def end_round(self, ended: RoundEnd) -> None:
        await self._call(EndRound(ended.stage, ended, deadline=_LOCAL_SECONDS))

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> bytes:
        # The averager of its stage may already have it; any other averager can fetch it from its holders.
        own = entry.descriptor.stage
        averager = own if own in self._stages else self._any_averager(ErrorCode.PAYLOAD_UNAVAILABLE)
        return await self._call(FetchPayload(averager, entry, deadline=deadline))

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        averager = self._any_averager(ErrorCode.STATE_UNAVAILABLE)
        download = replace(download, into=download.into.absolute())
        await self._call(FetchCheckpoint(averager, download, deadline=deadline))

    async def wait_closed(self) -> None:
        await self._host.wait_closed()

    async def close(self) -> None:
        """End the host and everything below it, and remove its sockets. May be called again."""
        await self._host.close(_CLOSE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _any_averager(self, code: ErrorCode) -> int:
        """The stage of an averager of this node, which alone can call other averagers.

        Raises HetnodeError `code` if there is none.
        """
        if not self._stages:
            raise HetnodeError(
                code,
                "This node hosts no stage yet, and so cannot fetch anything.",
                "Wait until the node has its assignment in the run.",
            )
        return self._stages[0]

    async def _call(self, request: HiveRequest[Answer]) -> Answer:
        call = encode_request(request)
        reply = asyncio.ensure_future(self._host.call(call))
        patience = request.deadline + _GRACE_SECONDS
        try:
            # Waits are counted, not clock time: a suspended machine stops the host and this process alike.
            while patience > 0:
                done, _ = await asyncio.wait({reply}, timeout=_LOOK_SECONDS)
                if done:
                    return decode_answer(request, reply.result())
                patience -= _LOOK_SECONDS
        finally:
            reply.cancel()
        # A host that does not answer may hold a lock for ever: end it, so that all calls fail at once.
        await self._host.close(grace=0.0)
        raise HetnodeError(
            ErrorCode.HIVEMIND_DIED,
            f"The hivemind process did not answer {call.method} within "
            f"{request.deadline + _GRACE_SECONDS:.0f} s; it was ended.",
            "Start the node again.",
        )


async def _start_host(line: Line) -> tuple[Child, Path]:
    """The host process, and the folder for its sockets."""
    # In the system's folder of temporary files: the path of a socket has at most 104 bytes.
    folder = Path(tempfile.mkdtemp(prefix="hetnode-"))
    try:
        host = await start_child(
            "node.hive.host",
            name="hivemind",
            died=ErrorCode.HIVEMIND_DIED,
            environment=_environment(folder) | line.environment,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return host, folder


def _environment(folder: Path) -> dict[str, str]:
    environment = {
        "HETNODE_LOG_LEVEL": logging.getLevelName(log.getEffectiveLevel()),
        "TMPDIR": str(folder),  # multiprocessing keeps sockets there
        # p2pd is written in Go. Above this it frees memory at once, where it would let twice as much gather.
        "GOMEMLIMIT": "128MiB",
    }
    if sys.platform == "linux":
        # By default hivemind's futures share memory by name, and that outlives a killed process by seconds.
        environment["HIVEMIND_MEMORY_SHARING_STRATEGY"] = "file_descriptor"
    return environment
