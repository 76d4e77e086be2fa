"""Keeps this node reachable through a relay: one connection from here, and one more for each caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import grpc

from node.net.membership import jittered
from node.net.peer_address import address_of
from node.net.streams import text_of
from node.security.channels import open_channel, tls_failure
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.relay.exposed import RelayedService
from protocol.relay.greeting import GREETING_SECONDS, TOKEN_BYTES, dial_back
from protocol.relay.server import PING_SECONDS
from protocol.server.admitted_sources import EVERYONE, AdmittedSources
from protocol.server.splice import SpliceEnd, carry
from protocol.trust.host_port import host_port
from protocol.trust.names import tls_name
from protocol.types import PeerId, RelayAddress
from protocol.wire.rpc_errors import error_from_rpc

log = logging.getLogger(__name__)

_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.5, 2.0
_RENEWAL_SECONDS = 10.0
"""How often a changed certificate is looked for."""
_MOST_CONNECTIONS = 256
_DIALS_AT_ONCE = 2
"""A relay serves four calls of a peer at once, of which two may be to expose it."""
_DIAL_SECONDS = 10.0
"""More than a relay carries for one peer: one that asks for more is faulty."""
_LAST_PORT = 65535
_OPTIONS = (
    ("grpc.max_receive_message_length", 4096),
    # Also keeps the entry in the router's NAT.
    ("grpc.keepalive_time_ms", int(1000 * PING_SECONDS)),
    ("grpc.keepalive_timeout_ms", int(1000 * PING_SECONDS)),
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel must connect at once, and not wait as long as the one before would have.
    ("grpc.use_local_subchannel_pool", 1),
)

LocalServer = Callable[[], tuple[str, int] | None]
"""Where a server of this machine listens now; None while there is none."""


class RelayAgent:
    """Makes the local servers of `peer` reachable through `relay` while :meth:`keep` runs.

    Args:
        credentials: called for each connection; the certificate to show.
        servers: where connections for each service go.

    Attributes:
        dht_port: the relay's port for this node's DHT peer; 0 before the first connection.
        connections: how often the relay was connected.
    """

    def __init__(
        self,
        relay: RelayAddress,
        peer: PeerId,
        credentials: Callable[[], Credentials],
        servers: Mapping[RelayedService, LocalServer],
    ) -> None:
        self.relay = relay
        self.dht_port, self.connections = 0, 0
        self._peer, self._credentials, self._servers = peer, credentials, servers
        self._changed = asyncio.Condition()
        self._away_since: float | None = asyncio.get_running_loop().time()
        self._carrying: dict[asyncio.Task[None], str | None] = {}  # the source of those to the DHT peer
        self._admitted = AdmittedSources(EVERYONE)
        self._dials = asyncio.Semaphore(_DIALS_AT_ONCE)
        self._stub: pb_grpc.RelayStub | None = None  # while there is a channel
        self._place: tuple[str, int] = ("", 0)

    @property
    def away(self) -> float:
        """Seconds since the relay was last connected; 0 while it is."""
        now = asyncio.get_running_loop().time()
        return 0.0 if self._away_since is None else now - self._away_since

    def admit(self, admitted: AdmittedSources) -> None:
        """Carry connections to the DHT peer from these sources alone; end those of others.

        To its port they all come from this machine. Until the first call everyone is admitted.
        """
        self._admitted = admitted
        for task, source in tuple(self._carrying.items()):
            if source is not None and not admitted.admits(source):
                task.cancel()

    async def connected(self) -> int:
        """Wait until this node is reachable through the relay, and return :attr:`dht_port`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._away_since is None)
        return self.dht_port

    async def dial(self, address: str) -> SpliceEnd:
        """A connection to ``host:port`` that the relay opens. Names are resolved here.

        Raises HetnodeError: NEIGHBOUR_UNREACHABLE, or a refusal of the relay; OSError; TimeoutError.
        """
        place = host_port(*await address_of(address, "another peer"))
        async with self._dials:
            if self._stub is None:
                raise ConnectionRefusedError("the relay is away")
            try:
                request = pb.DialRequest(peer=self._peer, address=place)
                reply = await self._stub.Dial(request, timeout=_DIAL_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise self._error_of(error) from None
        end = SpliceEnd()
        await asyncio.get_running_loop().create_connection(lambda: end, *self._place)
        end.write(dial_back(reply.token))
        return end

    async def keep(self) -> NoReturn:
        """Keep connected until cancelled. A relay that is away or refuses is only logged."""
        why, pause = "", _RETRY_SECONDS
        try:
            while True:
                try:
                    await self._hold()
                except (HetnodeError, OSError) as error:
                    if str(error) != why:
                        why = str(error)
                        log.warning("the relay %s is away: %s", self.relay.endpoint, why)
                if self._away_since is None:  # it was here
                    why, pause = "", _RETRY_SECONDS
                    self._away_since = asyncio.get_running_loop().time()
                await asyncio.sleep(jittered(pause))
                pause = min(2 * pause, _MOST_RETRY_SECONDS)
        finally:
            for task in tuple(self._carrying):
                task.cancel()

    async def _hold(self) -> None:
        """One connection to the relay, until it ends or this node's certificate is renewed."""
        shown = self._credentials()
        host, port = await address_of(self.relay.endpoint, f"the relay {self.relay.peer}")
        async with open_channel(host_port(host, port), shown, tls_name(self.relay.peer), _OPTIONS) as channel:
            request = pb.ExposeRequest(peer=self._peer, dht_port=self.dht_port)
            self._stub, self._place = pb_grpc.RelayStub(channel), (host, port)
            call = self._stub.Expose(request)
            reading = asyncio.create_task(self._read(call, (host, port)))
            try:
                while not reading.done() and self._credentials() == shown:
                    await asyncio.wait({reading}, timeout=_RENEWAL_SECONDS)
                if reading.done():
                    reading.result()
            finally:
                self._stub = None
                reading.cancel()
                call.cancel()

    async def _read(self, call: Any, relay: tuple[str, int]) -> None:
        try:
            async for reply in call:
                if reply.dht_port:
                    await self._connect(reply.dht_port)
                elif reply.HasField("waiting") and len(reply.waiting.token) == TOKEN_BYTES:
                    self._start_carrying(reply.waiting, relay)
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None

    async def _connect(self, dht_port: int) -> None:
        if dht_port > _LAST_PORT:
            raise HetnodeError(
                ErrorCode.NEIGHBOUR_UNREACHABLE,
                f"The relay at {self.relay.endpoint} is faulty: it names the port {dht_port}.",
                "No action is needed: this node tries again, and takes another relay if the run has one.",
            )
        async with self._changed:
            self.dht_port, self._away_since = dht_port, None
            self.connections += 1
            self._changed.notify_all()
        log.info("reachable through the relay %s, the DHT peer at its port %d", self.relay.endpoint, dht_port)

    def _start_carrying(self, waiting: pb.WaitingConnection, relay: tuple[str, int]) -> None:
        local = self._servers[RelayedService.DHT if waiting.dht else RelayedService.LINK]()
        if local is None or len(self._carrying) >= _MOST_CONNECTIONS:
            return
        if waiting.dht and not self._admitted.admits(waiting.source):
            log.debug("a connection of %s to the DHT peer is not admitted", waiting.source)
            return
        task = asyncio.create_task(self._carry(waiting.token, local, relay))
        self._carrying[task] = waiting.source if waiting.dht else None
        task.add_done_callback(self._carrying.pop)

    @staticmethod
    async def _carry(token: bytes, local: tuple[str, int], relay: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        inner, outer = SpliceEnd(), SpliceEnd()
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                await loop.create_connection(lambda: inner, *local)
                await loop.create_connection(lambda: outer, *relay)
            outer.write(dial_back(token))
            await carry(outer, inner)
        except (OSError, TimeoutError) as error:
            log.debug("a connection through the relay is lost: %s", error)
        finally:
            inner.abort()
            outer.abort()

    def _error_of(self, error: grpc.aio.AioRpcError) -> HetnodeError:
        refusal = error_from_rpc(error)
        if refusal is not None:
            return refusal
        if why := tls_failure(error):
            return HetnodeError(
                ErrorCode.CERTIFICATE_REFUSED,
                f"What answers at {self.relay.endpoint} is not the relay {self.relay.peer}: {why}.",
                "Check the clock of this machine; the operator of the run knows its relays.",
            )
        return HetnodeError(
            ErrorCode.NEIGHBOUR_UNREACHABLE,
            f"The relay at {self.relay.endpoint} does not answer ({error.code().name}: {text_of(error)}).",
            "No action is needed: this node tries again, and takes another relay if the run has one.",
        )
