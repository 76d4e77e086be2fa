"""A TCP gateway in front of a server: it owns the public port and bounds what one source may open.

gRPC and the transport begin a handshake for every connection. So connections are refused and counted here,
before a byte of them is read, and their bytes are copied to the server on a loopback port. The server sees
the gateway as its client; :meth:`Gateway.source_of` tells whose connection it really is.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from protocol.server.limits import FairShare, source_of, source_of_host
from protocol.server.refusal_log import RefusalLog
from protocol.server.splice import SpliceEnd, carry
from protocol.trust.rate_limit import RateLimit

_BACKLOG = 4096
_ACCEPTS_AT_ONCE = 64
"""Then other work of the event loop has its turn."""
_NO_DESCRIPTORS_SECONDS = 0.5
_CONNECT_ATTEMPTS = 10
_LOOPBACK = "127.0.0.1"
_NOT_ADMITTED = PermissionError("connections from there are not admitted")

Route = Callable[[SpliceEnd], Awaitable[int | None]]
"""Gets a client that has sent its first bytes. Returns the loopback port of the server that is to get it, or
None when it has carried the connection to its end itself.
"""


@dataclass(frozen=True)
class ConnectionLimits:
    """What one source may open. A source is an IPv4 address or an IPv6 /64.

    Attributes:
        burst: new connections at once.
        per_second: new connections in the long run.
        waiting: connections beyond these that wait for their turn; more are closed.
        open_each: open connections of one source.
        open_in_all: open connections of all sources.
        first_byte_seconds: after so long in silence a new connection is closed.
    """

    burst: int = 512
    per_second: float = 200.0
    waiting: int = 1024
    open_each: int = 2048
    open_in_all: int = 4096
    first_byte_seconds: float = 10.0


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`, a name or an address. Raises OSError.

    ``::`` is every address of this machine, IPv4 included; on a machine without IPv6 all those of IPv4.
    """
    if host == "::" and not has_ipv6():
        host = "0.0.0.0"
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind)
    try:
        # A closed connection of a former process must not count as a port in use.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)  # at once: two sockets may share a port on which neither listens
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def has_ipv6() -> bool:
    """Whether this machine can listen on IPv6 addresses."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


class Gateway:
    """Copies bytes between the clients of `listener` and a server of this machine.

    Args:
        listener: from :func:`listen_on`; closed with the gateway.
        admits: whether connections of a source are accepted. Others are closed without a byte, and are not
            counted in the limits.
        refusals: names the sources that are not admitted.

    Attributes:
        refused: how many connections were not admitted.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: ConnectionLimits | None = None,
        admits: Callable[[str], bool] = lambda _: True,
        refusals: RefusalLog | None = None,
    ) -> None:
        self._listener, self.limits = listener, limits or ConnectionLimits()
        self._admits, self._refusals = admits, refusals
        self.refused = 0
        self._open = FairShare(self.limits.open_each, self.limits.open_in_all)
        self._pace = RateLimit(self.limits.burst, self.limits.per_second, waiting=self.limits.waiting)
        self._clients: dict[str, SpliceEnd] = {}  # by gRPC's name of the gateway's end towards the server
        self._serving: dict[asyncio.Task[None], str] = {}  # the source of each
        self._route: Route

    @property
    def port(self) -> int:
        """The public one."""
        return int(self._listener.getsockname()[1])

    @property
    def host(self) -> str:
        """The address on which it listens."""
        return str(self._listener.getsockname()[0])

    @property
    def connections(self) -> int:
        """How many are open, those that wait included."""
        return len(self._open)

    def start(self, server_port: Callable[[], Awaitable[int]]) -> None:
        """Accept connections.

        Args:
            server_port: called for each connection; the loopback port of the server that is to get it.
        """
        self.start_routing(lambda _: server_port())

    def start_routing(self, route: Route) -> None:
        """Accept connections, and let `route` say what becomes of each."""
        self._route = route
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def source_of(self, peer: str) -> str:
        """The source of a call of the server, by gRPC's name of its client."""
        client = self._clients.get(peer)
        return client.source if client else source_of(peer)

    def port_of(self, peer: str) -> int:
        """The port from which the client of a call comes; 0 if that is gone."""
        client = self._clients.get(peer)
        return client.port if client else 0

    def close_connection(self, peer: str) -> None:
        """Close the connection of a call of the server, by gRPC's name of its client."""
        if client := self._clients.get(peer):
            client.abort()

    def close_refused(self) -> None:
        """Close the open connections of sources that are not admitted any more."""
        for task, source in tuple(self._serving.items()):
            if not self._admits(source):
                task.cancel()

    async def close(self) -> None:
        """Close the port and all connections."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in tuple(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left: without a pause this would be called again at once
                loop.remove_reader(self._listener)
                loop.call_later(_NO_DESCRIPTORS_SECONDS, self._accept_again)
                return
            source = source_of_host(address[0]) or "unknown"
            if not self._admits(source):
                connection.close()
                self.refused += 1
                if self._refusals is not None:
                    self._refusals.record(source, _NOT_ADMITTED)
                continue
            if not self._open.take(source):
                connection.close()
                continue
            delay = self._pace.delay(source, loop.time())
            if delay is None:
                self._open.release(source)
                connection.close()
                continue
            task = loop.create_task(self._serve(connection, source, delay))
            self._serving[task] = source
            task.add_done_callback(partial(self._end, connection))

    def _end(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        """Forget a connection. Not a part of its task: a task that is cancelled early never begins."""
        connection.close()
        self._open.release(self._serving.pop(task))

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.start_routing(self._route)

    async def _serve(self, connection: socket.socket, source: str, delay: float) -> None:
        """Carry one connection to its end."""
        client, server, peer = SpliceEnd(source), None, ""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(delay)
            connection.setblocking(False)
            await loop.connect_accepted_socket(lambda: client, connection)
            async with asyncio.timeout(self.limits.first_byte_seconds):
                await client.more()
            port = await self._route(client)
            if port is None:
                return
            server, peer = await self._connect(port)
            self._clients[peer] = client
            await carry(client, server)
        except (OSError, TimeoutError):
            pass  # the client says nothing, reads nothing, or is gone; or the server is
        finally:
            client.abort()
            if server is not None:
                server.abort()
                self._clients.pop(peer, None)

    async def _connect(self, port: int) -> tuple[SpliceEnd, str]:
        """A connection to a server of this machine, and that server's name of the client. Raises OSError."""
        loop = asyncio.get_running_loop()
        for _ in range(_CONNECT_ATTEMPTS):
            transport, server = await loop.create_connection(SpliceEnd, _LOOPBACK, port)
            peer = "ipv4:{}:{}".format(*transport.get_extra_info("sockname")[:2])
            # The system gives two connections the same port if they go to different ports, and the sources of
            # both would be one.
            if peer not in self._clients:
                return server, peer
            server.abort()
        raise OSError(f"no port of this machine for a connection to port {port}")
