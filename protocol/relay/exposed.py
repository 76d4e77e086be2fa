"""The peers that are reachable through a relay, and the connections that it carries for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.errors import ErrorCode, HetnodeError
from protocol.relay.greeting import GREETING_SECONDS, TOKEN_BYTES
from protocol.relay.ports import PeerPorts
from protocol.server.gateway import ConnectionLimits, Gateway
from protocol.server.limits import FairShare, source_of_host
from protocol.server.splice import SpliceEnd, carry
from protocol.trust.names import tls_name
from protocol.trust.rate_limit import ByteRate, RateLimit
from protocol.types import PeerId

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
"""For the connections that a relay opens."""


class RelayedService(StrEnum):
    """What a connection to a peer is for."""

    LINK = "link"
    DHT = "dht"


@dataclass(frozen=True)
class PeerLimits:
    """What a relay carries for one peer.

    Attributes:
        bytes_per_second: of all its connections, both directions together.
        streams: its connections at the same time.
        streams_of_source: those of one source; see FairShare for what a greedy source leaves to others.
        calls_at_once, calls_per_minute: new connections, from all sources.
        source_calls_at_once, source_calls_per_minute: new connections of one source.
        absence_seconds: its connections end if it is away for longer.
    """

    bytes_per_second: float = 12.5e6
    streams: int = 128
    streams_of_source: int = 48
    calls_at_once: int = 128
    calls_per_minute: float = 240.0
    source_calls_at_once: int = 32
    source_calls_per_minute: float = 60.0
    absence_seconds: float = 10.0


@dataclass(frozen=True)
class AwaitedDialBack:
    """A connection that waits until the peer dials back with the token."""

    token: bytes = field(repr=False)
    service: RelayedService
    source: str


class _Exposed:
    """One peer. Its `session` is the call by which it learns of connections; None while it is away."""

    def __init__(self, peer: PeerId, gateway: Gateway, limits: PeerLimits) -> None:
        self.peer, self.gateway = peer, gateway
        self.session: asyncio.Queue[AwaitedDialBack | None] | None = None
        self.rate = ByteRate(limits.bytes_per_second)
        self.ends: set[SpliceEnd] = set()
        self._streams = FairShare(limits.streams_of_source, limits.streams)
        self._calls = RateLimit(limits.calls_at_once, limits.calls_per_minute / 60, keys=1)
        self._source_calls = RateLimit(limits.source_calls_at_once, limits.source_calls_per_minute / 60)

    def take_stream(self, source: str, now: float) -> bool:
        # In this order, so that a source that is limited by itself uses up nothing of the others.
        if not self._source_calls.allows(source, now) or not self._streams.take(source):
            return False
        if self._calls.allows(None, now):
            return True
        self._streams.release(source)
        return False

    def release_stream(self, source: str) -> None:
        self._streams.release(source)

    def cut(self) -> None:
        for end in tuple(self.ends):
            end.abort()


class ExposedPeers:
    """Peers that keep a call of :meth:`expose` open, and their connections.

    Args:
        most_streams: connections of all peers at the same time.
    """

    def __init__(self, ports: PeerPorts, limits: PeerLimits, most_streams: int) -> None:
        self._ports, self._limits = ports, limits
        self._streams = FairShare(limits.streams, most_streams)
        self._by_name: dict[str, _Exposed] = {}
        self._waiting: dict[bytes, asyncio.Future[SpliceEnd]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._dialled: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def ports(self) -> frozenset[int]:
        """Those of this machine that belong to the DHT peers behind the relay."""
        return frozenset(each.gateway.port for each in self._by_name.values())

    async def expose(
        self, peer: PeerId, seconds: float, wanted_port: int
    ) -> AsyncGenerator[int | AwaitedDialBack, None]:
        """Make `peer` reachable for `seconds`: first the port of its DHT peer, then each connection for it.

        A later call of the same peer ends this one, and keeps port and connections. When no call follows,
        the connections end: at once after `seconds`, after `absence_seconds` where the caller is gone.

        Raises HetnodeError RATE_LIMITED if all ports are taken.
        """
        exposed = self._by_name.get(tls_name(peer)) or self._add(peer, wanted_port)
        if exposed.session is not None:
            exposed.session.put_nowait(None)
        session = exposed.session = asyncio.Queue[AwaitedDialBack | None]()
        clock, is_over = asyncio.get_running_loop().time, False
        ends = clock() + seconds
        try:
            yield exposed.gateway.port
            while True:
                async with asyncio.timeout(ends - clock()):
                    waiting = await session.get()
                if waiting is None:
                    break
                yield waiting
        except TimeoutError:
            log.info("the certificate of %s has expired: its connections end", peer)
            is_over = True
        finally:
            if exposed.session is session:
                exposed.session = None
                if is_over:
                    self._remove(exposed)
                else:
                    loop = asyncio.get_running_loop()
                    loop.call_later(self._limits.absence_seconds, self._remove_absent, exposed)

    def remove(self, peers: Collection[PeerId]) -> None:
        """End the calls and the connections of `peers` at once."""
        for exposed in [each for each in self._by_name.values() if each.peer in peers]:
            self._remove(exposed)

    async def carry_for(self, name: str, client: SpliceEnd) -> None:
        """Carry a link of `client` to the peer with this TLS name. Raises ConnectionRefusedError."""
        exposed = self._by_name.get(name)
        if exposed is None:
            raise ConnectionRefusedError("no peer of that name is here")
        await self._carry(exposed, RelayedService.LINK, client)

    async def dial(self, peer: PeerId, host: str, port: int) -> bytes:
        """Connect to `host`, an address, for a peer that is exposed here. Returns a token for it.

        Raises ConnectionRefusedError; OSError or TimeoutError if nothing answers there.
        """
        exposed = self._by_name.get(tls_name(peer))
        if exposed is None:
            raise ConnectionRefusedError("only a peer that is reachable here may dial")
        there = SpliceEnd(source_of_host(host))
        self._take(exposed, there.source)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.get_running_loop().create_connection(lambda: there, host, port)
            if self._by_name.get(tls_name(peer)) is not exposed:
                raise ConnectionRefusedError("that peer was removed meanwhile")
        except BaseException:
            there.abort()
            self._release(exposed, there.source)
            raise
        exposed.ends.add(there)
        token = secrets.token_bytes(TOKEN_BYTES)
        task = asyncio.create_task(self._join(exposed, there, token))
        self._dialled.add(task)
        task.add_done_callback(self._dialled.discard)
        return token

    async def answer(self, token: bytes, end: SpliceEnd) -> None:
        """Join `end` to the connection that waits with this token, and wait until it is closed.

        Raises ConnectionRefusedError if none does: a token is good for one time and some seconds.
        """
        waiting = self._waiting.pop(token, None)
        if waiting is None or waiting.done():
            raise ConnectionRefusedError("an unknown token")
        waiting.set_result(end)
        await asyncio.wait((end.lost,))

    async def close(self) -> None:
        for exposed in list(self._by_name.values()):
            self._remove(exposed)
        if ending := self._closing | self._dialled:
            await asyncio.wait(ending)

    def _add(self, peer: PeerId, wanted_port: int) -> _Exposed:
        try:
            listener = self._ports.listen(peer, wanted_port)
        except OSError as error:
            raise HetnodeError(
                ErrorCode.RATE_LIMITED,
                f"The relay is full: {error}.",
                "Take another relay, or ask its operator for a larger range of ports.",
            ) from None
        limits = self._limits
        gateway = Gateway(
            listener,
            ConnectionLimits(
                burst=limits.source_calls_at_once,
                per_second=limits.source_calls_per_minute / 60,
                waiting=limits.streams_of_source,
                open_each=limits.streams_of_source,
                open_in_all=limits.streams,
                first_byte_seconds=GREETING_SECONDS,
            ),
        )
        exposed = self._by_name[tls_name(peer)] = _Exposed(peer, gateway, limits)

        async def carry_dht(client: SpliceEnd) -> None:
            await self._carry(exposed, RelayedService.DHT, client)

        gateway.start_routing(carry_dht)
        log.info("peer %s is reachable through this relay, its DHT peer on port %d", peer, gateway.port)
        return exposed

    def _remove_absent(self, exposed: _Exposed) -> None:
        if exposed.session is None:
            self._remove(exposed)

    def _remove(self, exposed: _Exposed) -> None:
        if self._by_name.get(tls_name(exposed.peer)) is not exposed:
            return
        del self._by_name[tls_name(exposed.peer)]
        if exposed.session is not None:
            exposed.session.put_nowait(None)
            exposed.session = None
        exposed.cut()
        closing = asyncio.create_task(exposed.gateway.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        log.info("peer %s is no longer reachable through this relay", exposed.peer)

    async def _carry(self, exposed: _Exposed, service: RelayedService, client: SpliceEnd) -> None:
        if exposed.session is None:
            raise ConnectionRefusedError("that peer is away")
        self._take(exposed, client.source)
        token = secrets.token_bytes(TOKEN_BYTES)
        exposed.session.put_nowait(AwaitedDialBack(token, service, client.source))
        await self._join(exposed, client, token)

    async def _join(self, exposed: _Exposed, waiting: SpliceEnd, token: bytes) -> None:
        """Carry `waiting`, whose stream is taken, once the peer has dialled back with the token."""
        answer: asyncio.Future[SpliceEnd] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        exposed.ends.add(waiting)
        try:
            await asyncio.wait(
                (answer, waiting.lost), timeout=GREETING_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                back = answer.result()
                waiting.rate = back.rate = exposed.rate
                await carry(waiting, back)
        finally:
            waiting.abort()
            self._waiting.pop(token, None)
            exposed.ends.discard(waiting)
            self._release(exposed, waiting.source)
            if answer.done():
                answer.result().abort()
            answer.cancel()

    def _take(self, exposed: _Exposed, source: str) -> None:
        """Take a stream of that peer. Raises ConnectionRefusedError if it has enough, or this relay has."""
        if not self._streams.take(exposed.peer):
            raise ConnectionRefusedError("this relay has enough connections")
        if not exposed.take_stream(source, asyncio.get_running_loop().time()):
            self._streams.release(exposed.peer)
            raise ConnectionRefusedError("that peer has enough connections")

    def _release(self, exposed: _Exposed, source: str) -> None:
        exposed.release_stream(source)
        self._streams.release(exposed.peer)
