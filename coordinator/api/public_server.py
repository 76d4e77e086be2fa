"""A public port of the coordinator: a gateway, and behind it a gRPC server for each certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from coordinator.authority import Authority, ServerCertificate
from protocol.errors import ErrorCode
from protocol.server.gateway import Gateway
from protocol.server.renewed_server import RenewedServer, ServerTls


@dataclass(frozen=True)
class PublicServer:
    """A gateway and the servers behind it. None: another one shares its port with them.

    `refused` counts their refused calls, by code.
    """

    gateway: Gateway | None
    server: RenewedServer
    refused: Counter[ErrorCode]

    async def start(self) -> None:
        await self.server.start("127.0.0.1")
        if self.gateway is not None:
            self.gateway.start(self.server.port)

    async def stop(self, grace: float) -> None:
        """End calls that go on for more than `grace` seconds, and close all connections."""
        await self.server.stop(grace)
        if self.gateway is not None:
            await self.gateway.close()


def public_server(
    gateway: Gateway | None,
    new_server: Callable[..., grpc.aio.Server],
    certificate: ServerCertificate,
    authority: Authority,
    clients: bool,
    refused: Counter[ErrorCode],
) -> PublicServer:
    """Not started yet.

    Args:
        new_server: given options of gRPC, makes a server with its services and without a port.
        clients: clients must show a certificate of the run.
        refused: counts the refused calls.
    """

    def tls() -> ServerTls:
        return ServerTls(*certificate.pair(), authority.pem if clients else None)

    return PublicServer(gateway, RenewedServer(new_server, tls, False, 2 * authority.seconds), refused)
