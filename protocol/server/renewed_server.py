"""A gRPC server whose certificate is renewed: each certificate has a server object of its own.

gRPC can ask for a certificate at every handshake, but handshakes at the same time then crash it: one replaces
the configuration while another one reads it. So a server here never changes its certificate. A new one takes
the new connections, and the former one carries the open ones to their end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from protocol.server.gateway import listen_on
from protocol.trust.host_port import host_port

FORMER_SECONDS = 2 * 86400.0
"""So long, two lives of a certificate, calls may go on that have begun under a former certificate."""


@dataclass(frozen=True)
class ServerTls:
    """What a server shows, PEM, and the authority of its clients; None if they need no certificate."""

    key: bytes
    certificate: bytes
    client_authority: bytes | None

    def credentials(self) -> grpc.ServerCredentials:
        pair = (self.key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.client_authority, self.client_authority is not None)


class RenewedServer:
    """The servers of one service, of which the newest gets new connections.

    Args:
        new_server: given options of gRPC, makes a server with its services and without a port.
        tls: what the newest server must show.
        same_port: all servers share the first one's port, and a former one stops listening. Otherwise each
            has a port of its own, and a former one also serves new calls of its open connections.
        former_seconds: when a former server ends its last calls.
    """

    def __init__(
        self,
        new_server: Callable[..., grpc.aio.Server],
        tls: Callable[[], ServerTls],
        same_port: bool,
        former_seconds: float = FORMER_SECONDS,
    ) -> None:
        self._new_server, self._tls, self._same_port = new_server, tls, same_port
        self._former_seconds = former_seconds
        self._host, self._port = "", 0
        self._shown: ServerTls | None = None
        self._newest: grpc.aio.Server | None = None
        self._former: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._renewing = asyncio.Lock()
        self._is_stopped = False

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on `host`, and return the port. Raises OSError if `port` is in use."""
        if self._same_port and port:
            # Servers that share a port would not notice another program that listens there.
            listen_on(host, port).close()
        self._host, self._port = host, port
        return await self.port()

    async def port(self) -> int:
        """The port of the newest server, which is replaced first if `tls` has changed.

        Raises OSError if that fails, or after :meth:`stop`.
        """
        if self._tls() != self._shown:
            async with self._renewing:
                if (tls := self._tls()) != self._shown:
                    if self._is_stopped:
                        raise OSError("the server has stopped")
                    await self._replace(tls)
        return self._port

    async def stop(self, grace: float) -> None:
        """Stop listening, and end calls that go on for more than `grace` seconds."""
        async with self._renewing:
            self._is_stopped = True
            for task in self._former.values():
                task.cancel()
            servers = [*self._former, *filter(None, (self._newest,))]
            await asyncio.gather(*(server.stop(grace) for server in servers))

    async def _replace(self, tls: ServerTls) -> None:
        server = self._new_server(("grpc.so_reuseport", int(self._same_port)))
        wanted = self._port if self._same_port else 0
        try:
            port = server.add_secure_port(host_port(self._host, wanted), tls.credentials())
        except RuntimeError as error:
            raise OSError(str(error)) from None
        if not port:
            raise OSError(f"cannot listen on {host_port(self._host, wanted)}")
        await server.start()
        if self._newest is not None:
            former = self._newest
            task = self._former[former] = asyncio.create_task(self._retire(former))
            task.add_done_callback(lambda _: self._former.pop(former, None))
        self._newest, self._port, self._shown = server, int(port), tls

    async def _retire(self, former: grpc.aio.Server) -> None:
        if self._same_port:
            await former.stop(self._former_seconds)
        else:
            # Its clients notice a stop: a call that begins meanwhile may fail. Most are gone by then.
            await asyncio.sleep(self._former_seconds / 2)
            await former.stop(self._former_seconds / 2)
