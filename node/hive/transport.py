"""What the main process sees of hivemind: DHT records, and the exchange and fetching of payloads.

Never imports hivemind or torch. Every call has a deadline, and whatever goes wrong arrives as a HetnodeError.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.hive.clock import coordinator_time
from node.ipc.channel import Child, Reply, start_child
from node.security.identity import Identity
from node.transport.transport import Buffer, CheckpointDownload, ExchangeResult, Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import (
    ExchangeGroup,
    ManifestEntry,
    PayloadDescriptor,
    PeerId,
    PeerRecord,
    Rejection,
)
from protocol.wire.convert.payloads import group_to_pb, state_to_pb
from protocol.wire.records import descriptor_from_bytes, descriptor_to_bytes, open_record, seal_record

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_DHT_SECONDS = 15.0
_LOCAL_SECONDS = 15.0
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 15.0
"""How much longer than the deadline the host may take to answer before it is taken for dead."""


class HivemindTransport(Transport):
    """A node's connection to hivemind's network, run by a host process of its own.

    Create it with :meth:`start`. When the host process or one of its children dies, every open and every
    later call raises HIVEMIND_DIED; the node has to be started again.
    """

    def __init__(
        self,
        host: Child,
        folder: Path,
        identity: Identity,
        certificate: Path,
        authority: x509.Certificate,
        clock_offset: float,
    ) -> None:
        self._host, self._folder, self._identity = host, folder, identity
        self._certificate, self._authority, self._clock_offset = certificate, authority, clock_offset
        self._addresses: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses for the `initial_peers` of others; empty in client mode."""
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
        client_mode: bool = False,
        clock_offset: float = 0.0,
    ) -> HivemindTransport:
        """Spawn the host and join the DHT.

        Args:
            identity: its key file becomes the libp2p identity, so ``identity.peer`` is the peer id.
            certificate: PEM file of this peer's certificate; read anew whenever it was replaced.
            authority: PEM file of the authority, whose other peers alone are believed.
            run: names the DHT key and the averaging groups; without dots.
            initial_peers: multiaddresses of the DHT to join; none starts a new one.
            listen_host: address, or a name for it, of the interface to listen on.
            listen_port: 0 takes a free one.
            advertise: host name or address that others are told; None tells the listening addresses.
            client_mode: accept no connections: only dial.
            clock_offset: seconds by which the coordinator's clock is ahead of this machine's. Peers whose
                corrected clocks differ by more than 3 seconds cannot use the DHT together.

        Raises:
            HetnodeError: PORT_IN_USE, BAD_ADDRESS, DHT_UNREACHABLE, HIVEMIND_DIED. Nothing is left behind.
        """
        address, port = _usable_address(listen_host, listen_port)
        # Sockets and little else live here; a short path, because a socket's path has at most 104 bytes.
        folder = Path(tempfile.mkdtemp(prefix="hetnode-"))
        try:
            host = await start_child(
                "node.hive.host",
                name="hivemind",
                died=ErrorCode.HIVEMIND_DIED,
                environment=_environment(folder),
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        issuer = x509.load_pem_x509_certificate(authority.read_bytes())
        hivemind = cls(host, folder, identity, certificate, issuer, clock_offset)
        try:
            body = {
                "run": run,
                "peer": identity.peer,
                "initial_peers": list(initial_peers),
                "listen": _multiaddress(address, port),
                "announce": None if advertise is None else _multiaddress(advertise, port),
                "identity_path": str(identity.path),
                "certificate": str(certificate),
                "authority": str(authority),
                "client_mode": client_mode,
                "clock_offset": clock_offset,
                "folder": str(folder),
                "deadline": _START_SECONDS,
            }
            reply = await hivemind._call("start_dht", body, deadline=_START_SECONDS)
            assert reply.body["peer"] == identity.peer, "p2pd and we derive the peer id from the same key"
            hivemind._addresses = tuple(reply.body["addresses"])
        except BaseException:
            await hivemind.close()
            raise
        return hivemind

    async def host_stages(
        self, capacities: Mapping[int, int], payload_folder: Path, checkpoint_folder: Path, keep_rounds: int
    ) -> None:
        body = {
            "capacities": {str(stage): nbytes for stage, nbytes in capacities.items()},
            "payload_folder": str(payload_folder.absolute()),
            "checkpoint_folder": str(checkpoint_folder.absolute()),
            "keep_rounds": keep_rounds,
            "deadline": _START_SECONDS,
        }
        await self._call("host_stages", body, deadline=_START_SECONDS)

    async def admit(self, peers: Collection[PeerId], banned: Collection[PeerId] = ()) -> None:
        body = {"peers": sorted(set(peers) - set(banned)), "banned": sorted(banned)}
        await self._call("admit", {**body, "deadline": _LOCAL_SECONDS}, deadline=_LOCAL_SECONDS)

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        expires = coordinator_time(self._clock_offset) + ttl
        shown = x509.load_pem_x509_certificate(self._certificate.read_bytes()).public_bytes(Encoding.DER)
        sealed = seal_record(record, self._identity.sign, expires, shown)
        body = {"peer": self._identity.peer, "expires": expires, "deadline": _DHT_SECONDS}
        await self._call("publish", body, sealed, deadline=_DHT_SECONDS)

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        reply = await self._call("lookup", {"deadline": _DHT_SECONDS}, deadline=_DHT_SECONDS)
        records = {}
        now = coordinator_time(self._clock_offset)
        for peer, sealed in zip(reply.body["peers"], reply.blobs, strict=True):
            try:
                records[PeerId(peer)] = open_record(bytes(sealed), peer, self._authority, now).record
            except HetnodeError as error:
                log.debug("ignored a DHT record of %s: %s", peer, error)
        return records

    async def exchange(
        self,
        payload: Buffer,
        descriptor: PayloadDescriptor,
        group: ExchangeGroup | None,
        *,
        expected: int,
        deadline: float,
    ) -> ExchangeResult:
        body = {"stage": descriptor.stage, "expected": expected, "deadline": deadline}
        blobs = [payload, descriptor_to_bytes(descriptor)]
        if group is not None:
            blobs.append(group_to_pb(group).SerializeToString())
        reply = await self._call("exchange", body, *blobs, deadline=deadline)
        descriptors = [descriptor_from_bytes(bytes(blob)) for blob in reply.blobs]
        reasons = reply.body["refused"]
        held, refused = descriptors[: -len(reasons) or None], descriptors[len(descriptors) - len(reasons) :]
        return ExchangeResult(
            tuple(sorted(held, key=lambda each: each.owner)), tuple(map(Rejection, refused, reasons))
        )

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> bytes:
        body = {"stage": entry.descriptor.stage, "holders": list(entry.holders), "deadline": deadline}
        reply = await self._call("fetch", body, descriptor_to_bytes(entry.descriptor), deadline=deadline)
        return bytes(reply.blobs[0])

    async def fetch_checkpoint(self, download: CheckpointDownload) -> None:
        body = {
            "donors": dict(download.donors),
            "nbytes": download.nbytes,
            "header": download.header,
            "into": str(download.into.absolute()),
            "deadline": download.deadline,
        }
        blob = state_to_pb(download.record).SerializeToString()
        await self._call("fetch_state", body, blob, deadline=download.deadline)

    async def wait_closed(self) -> None:
        await self._host.wait_closed()

    async def close(self) -> None:
        """End the host and everything below it, and remove its sockets. May be called again."""
        await self._host.close(_CLOSE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _call(self, method: str, body: Mapping[str, Any], *blobs: Buffer, deadline: float) -> Reply:
        reply = asyncio.ensure_future(self._host.call(method, body, *blobs))
        patience = deadline + _GRACE_SECONDS
        try:
            # Counted in looks at it, not by a clock: suspended for a while, both sides have lost that time.
            while patience > 0:
                done, _ = await asyncio.wait({reply}, timeout=_LOOK_SECONDS)
                if done:
                    return reply.result()
                patience -= _LOOK_SECONDS
        finally:
            reply.cancel()
        await self._host.close(grace=0.0)
        raise HetnodeError(
            ErrorCode.HIVEMIND_DIED,
            f"The hivemind process did not answer '{method}' within {deadline + _GRACE_SECONDS:.0f} s; "
            "it was ended.",
            "Start the node again.",
        )


def _environment(folder: Path) -> dict[str, str]:
    environment = {
        "HETNODE_LOG_LEVEL": logging.getLevelName(log.getEffectiveLevel()),
        "TMPDIR": str(folder),  # multiprocessing keeps sockets there
    }
    if sys.platform == "linux":
        # hivemind's futures share memory by name, which would outlive a killed process by seconds.
        environment["HIVEMIND_MEMORY_SHARING_STRATEGY"] = "file_descriptor"
    return environment


def _multiaddress(host: str, port: int) -> str:
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"


def _usable_address(host: str, port: int) -> tuple[str, int]:
    """The IP address and port to listen on; a free port for 0, because libp2p announces explicit ones only.

    libp2p would share a port that is taken (SO_REUSEPORT) without a word, and get half of its connections.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not matter
            probe.bind(address)
            ip, port, *_ = probe.getsockname()
            return str(ip), int(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise HetnodeError(
                ErrorCode.PORT_IN_USE,
                f"Port {port} of {host} is in use by another process.",
                "Choose another port for the DHT, or 0 for a free one.",
            ) from None
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"This machine cannot listen on '{host}': {error}.",
            "Give an address of one of this machine's interfaces, or 0.0.0.0 for all of them.",
        ) from None
