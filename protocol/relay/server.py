"""A relay: one public port for all peers behind it, and one more for the DHT peer of each.

It reads the server name of a TLS greeting and copies ciphertext: mutual TLS and Noise go from end to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Set
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
from cryptography import x509

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.relay.destinations import Destinations
from protocol.relay.exposed import ExposedPeers, PeerLimits, RelayedService
from protocol.relay.greeting import GREETING_SECONDS, BadGreeting, ForToken, Greeting, greeting_in
from protocol.relay.ports import PeerPorts
from protocol.server.calls import CallInterceptor, CallPolicy, Context
from protocol.server.gateway import ConnectionLimits, Gateway
from protocol.server.limits import FairShare
from protocol.server.refusal_log import RefusalLog
from protocol.server.renewed_server import RenewedServer, ServerTls
from protocol.server.splice import SpliceEnd
from protocol.trust.names import identity_of, peer_of, peer_uri, tls_name
from protocol.types import PeerId

log = logging.getLogger(__name__)

PING_SECONDS = 5.0
"""Both ends of a control connection notice within two of these that the other one is gone."""
_MAX_MESSAGE_BYTES = 4096
_CALLS_OF_PEER, _MAX_CALLS = 4, 4096
_HANDSHAKE_MS = 10_000


@dataclass(frozen=True)
class RelayLimits:
    """What a relay bears.

    Attributes:
        connections: at its public port; the dial-backs of all peers behind one address count as one source.
        greetings_of_source, greetings: connections that have not said yet what they want.
        streams: relayed connections of all peers behind it.
        peer: for each peer behind it.
    """

    connections: ConnectionLimits = field(
        default_factory=lambda: ConnectionLimits(burst=128, per_second=30.0, waiting=128)
    )
    greetings_of_source: int = 32
    greetings: int = 256
    streams: int = 2048
    peer: PeerLimits = field(default_factory=PeerLimits)


class RelayServer:
    """The relay of `peer`.

    Args:
        gateway: its public port, not started yet; closed with the relay, unless it is shared.
        tls: the certificate of `peer`, and the authority of the peers that it serves.
        ports: for DHT peers, on the same host; range(0) takes any free ones.
        sharing: other servers behind the public port: their TLS names, and their loopback ports as in
            :meth:`Gateway.start`.
        destinations: where it connects to for the peers behind it; None for nowhere.
    """

    def __init__(
        self,
        gateway: Gateway,
        peer: PeerId,
        tls: Callable[[], ServerTls],
        ports: range = range(0),
        limits: RelayLimits | None = None,
        sharing: Mapping[str, Callable[[], Awaitable[int]]] | None = None,
        destinations: Destinations | None = None,
    ) -> None:
        self._destinations = destinations or Destinations(members=tuple)
        self._sharing = sharing or {}
        self._name = tls_name(peer)
        self._limits = limits or RelayLimits()
        self._gateway = gateway
        self.exposed = ExposedPeers(PeerPorts(gateway.host, ports), self._limits.peer, self._limits.streams)
        self._greetings = FairShare(self._limits.greetings_of_source, self._limits.greetings)
        self._banned: Set[PeerId] = frozenset()
        self._refusals = RefusalLog(log)
        admission = CallPolicy(
            identity_of,
            self._gateway.source_of,
            self._gateway.close_connection,
            self._check,
            FairShare(_CALLS_OF_PEER, _MAX_CALLS),
            _Stopping,
            log,
        )
        self._interceptor = CallInterceptor(admission)
        self._server = RenewedServer(self._new_server, tls, same_port=False)

    @property
    def port(self) -> int:
        """The public one."""
        return self._gateway.port

    async def start(self) -> None:
        await self._server.start("127.0.0.1")
        self._gateway.start_routing(self._route)

    async def stop(self) -> None:
        """End all connections, and close all ports but one that is shared."""
        await self.exposed.close()
        await self._server.stop(grace=0.0)
        if not self._sharing:
            await self._gateway.close()

    def refuse(self, banned: Set[PeerId]) -> None:
        """Serve none of the `banned` peers from now on, and end what is carried for them."""
        self._banned = banned
        self.exposed.remove(banned)

    async def _route(self, client: SpliceEnd) -> int | None:
        try:
            match await self._greeting(client):
                case ForToken(token):
                    await self.exposed.answer(token, client)
                    return None
                case greeting if greeting.name == self._name:
                    return await self._server.port()
                case greeting if greeting.name in self._sharing:
                    return await self._sharing[greeting.name]()
                case greeting:
                    await self.exposed.carry_for(greeting.name, client)
                    return None
        except (BadGreeting, ConnectionRefusedError) as error:
            self._refusals.record(client.source, error)
            return None

    async def _greeting(self, client: SpliceEnd) -> Greeting:
        """Read the greeting; what belongs to the connection itself stays in `client.first`."""
        if not self._greetings.take(client.source):
            raise ConnectionRefusedError("too many connections that say nothing")
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                while (greeting := greeting_in(bytes(client.first))) is None:
                    await client.more(than=len(client.first))
        finally:
            self._greetings.release(client.source)
        if isinstance(greeting, ForToken):
            del client.first[: len(greeting)]
        return greeting

    def _check(self, context: Context) -> None:
        peer = peer_of(identity_of(context))
        if peer in self._banned:
            raise HetnodeError(
                ErrorCode.BANNED,
                f"Peer {peer} is banned from this run.",
                "Only the operator of the run can lift the ban.",
            )

    def _new_server(self, *options: tuple[str, int]) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=(self._interceptor,),
            options=(
                *options,
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                ("grpc.keepalive_time_ms", int(1000 * PING_SECONDS)),
                ("grpc.keepalive_timeout_ms", int(1000 * PING_SECONDS)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", int(500 * PING_SECONDS)),
            ),
        )
        pb_grpc.add_RelayServicer_to_server(RelayService(self.exposed, self._dial), server)
        return server

    async def _dial(self, peer: PeerId, address: str, caller: str) -> bytes:
        """See :meth:`ExposedPeers.dial`, for gRPC's name of a client."""
        own_ports = {self.port, *self.exposed.ports}
        host, port = await self._destinations.place(address, self._gateway.source_of(caller), own_ports)
        return await self.exposed.dial(peer, host, port)


Dial = Callable[[PeerId, str, str], Awaitable[bytes]]
"""Given a peer, ``host:port`` and gRPC's name of the client: the token of the connection there."""


class RelayService(pb_grpc.RelayServicer):
    """Makes the callers reachable, and connects for them."""

    def __init__(self, exposed: ExposedPeers, dial: Dial) -> None:
        self._exposed, self._dial = exposed, dial

    async def Dial(self, request: pb.DialRequest, context: Context) -> pb.DialReply:
        _check_caller(request.peer, context)
        try:
            token = await self._dial(PeerId(request.peer), request.address, context.peer())
        except (OSError, TimeoutError) as error:
            raise HetnodeError(
                ErrorCode.NEIGHBOUR_UNREACHABLE,
                f"The relay does not connect to {request.address[:64]!r}: {error or 'no answer'}.",
                "No action is needed: the caller tries again.",
            ) from None
        return pb.DialReply(token=token)

    async def Expose(
        self, request: pb.ExposeRequest, context: Context
    ) -> AsyncGenerator[pb.ExposeReply, None]:
        _check_caller(request.peer, context)
        seconds = _seconds_left(context)
        wanted = request.dht_port if request.dht_port < 65536 else 0
        async with aclosing(self._exposed.expose(PeerId(request.peer), seconds, wanted)) as told:
            async for each in told:
                if isinstance(each, int):
                    yield pb.ExposeReply(dht_port=each)
                else:
                    is_dht = each.service is RelayedService.DHT
                    waiting = pb.WaitingConnection(token=each.token, dht=is_dht, source=each.source)
                    yield pb.ExposeReply(waiting=waiting)


def _check_caller(peer: str, context: Context) -> None:
    if not peer or identity_of(context) != peer_uri(peer):
        raise HetnodeError(
            ErrorCode.CERTIFICATE_REFUSED,
            f"A call in the name of {peer[:64]!r} came with another certificate.",
            "Use the certificate that this run has issued to the caller.",
        )


def _seconds_left(context: Context) -> float:
    """The rest of the life of the client's certificate, which TLS has verified at the handshake only."""
    shown = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
    return x509.load_pem_x509_certificate(shown).not_valid_after_utc.timestamp() - time.time()


class _Stopping(Exception):
    """Never raised: a relay that stops ends its calls itself."""
