"""The coordinator's own relay, for nodes that accept no connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from socket import socket

from coordinator.api.public_ports import ListenAddresses, PublicPorts, RelayOptions, listen, split_listen
from coordinator.api.public_server import PublicServer
from coordinator.authority import Authority, ServerCertificate
from coordinator.membership.sources import MemberSources
from coordinator.run.command_loop import RUN_TOPIC, CommandLoop, Stopped
from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.relay.destinations import Destinations
from protocol.relay.ports import ports_after
from protocol.relay.server import RelayLimits, RelayServer
from protocol.server.gateway import Gateway
from protocol.server.renewed_server import ServerTls
from protocol.trust.host_port import host_port, tcp_place
from protocol.trust.names import COORDINATOR_NAME, ENROLLMENT_NAME
from protocol.types import PeerId, RelayAddress

log = logging.getLogger(__name__)


def open_relay(
    addresses: ListenAddresses, ports: PublicPorts, peer: PeerId, stack: AsyncExitStack
) -> OwnRelay | None:
    """The relay of the coordinator, which is `peer`, at a port that listens from now on; None without one.

    Raises HetnodeError BAD_ADDRESS, PORT_IN_USE. `stack` closes the port.
    """
    options = addresses.relay or (RelayOptions() if ports.is_shared else None)
    if options is None:
        return None
    gateway, advertised = ports.api, addresses.advertise or split_listen(addresses.api)[0]
    if not ports.is_shared:
        limits = replace(RelayLimits().connections, open_in_all=ports.api.limits.open_in_all)
        host, listener = _listener(addresses, options, ports.enrollment.port)
        stack.callback(listener.close)
        gateway, advertised = Gateway(listener, limits), addresses.advertise or host
    return OwnRelay(gateway, options, RelayAddress(peer, host_port(advertised, gateway.port)))


def _listener(addresses: ListenAddresses, options: RelayOptions, enrollment_port: int) -> tuple[str, socket]:
    """The host and a socket that listens there, on a free port if the one after the others is taken."""
    host, port = split_listen(options.listen or addresses.api)
    if options.listen:
        return host, listen(options.listen)
    after = enrollment_port + 1
    if after == addresses.dht_port:
        after += 1
    try:
        return host, listen(host_port(host, after if port else 0))
    except HetnodeError as error:
        if error.code is not ErrorCode.PORT_IN_USE:
            raise
        log.warning("the relay takes a free port: port %d is taken", after)
        return host, listen(host_port(host, 0))


class OwnRelay:
    """The coordinator's relay.

    Attributes:
        address: for nodes.
        uplink: bytes per second that it can send for all nodes together; 0 if that is not known.
    """

    def __init__(self, gateway: Gateway, options: RelayOptions, address: RelayAddress) -> None:
        self.address, self.uplink = address, options.uplink
        self._gateway, self._dht = gateway, options.dht or ports_after(gateway.port)

    async def start(
        self,
        command_loop: CommandLoop,
        authority: Authority,
        sources: MemberSources,
        dht_addresses: Sequence[str],
        servers: tuple[PublicServer, PublicServer],
        stack: AsyncExitStack,
    ) -> None:
        """See :class:`coordinator.api.relay.Relay`."""
        certificate = ServerCertificate(authority, self.address.peer)

        def tls() -> ServerTls:
            return ServerTls(*certificate.pair(), authority.pem)

        places = [place for place in map(tcp_place, dht_addresses) if place]
        destinations = Destinations(
            lambda: sources.without(command_loop.state.excluded),
            hosts={host for host, _ in places},
            ports={port for _, port in places},
        )
        named = zip((COORDINATOR_NAME, ENROLLMENT_NAME), servers, strict=True)
        sharing = {name: each.server.port for name, each in named if each.gateway is None}
        # Each stream takes a second connection, by which the node dials back.
        connections = self._gateway.limits
        limits = RelayLimits(connections, streams=connections.open_in_all // 2)
        server = RelayServer(self._gateway, self.address.peer, tls, self._dht, limits, sharing, destinations)
        await server.start()
        stack.push_async_callback(server.stop)
        stack.callback(asyncio.create_task(_keep_refusing(server, command_loop)).cancel)


async def _keep_refusing(server: RelayServer, command_loop: CommandLoop) -> None:
    """End what is carried for peers that are excluded from the run."""
    known = frozenset[PeerId]()

    def changed(state: State) -> frozenset[PeerId] | None:
        return None if state.excluded == known else state.excluded

    with suppress(Stopped):
        while True:
            known = await command_loop.until(RUN_TOPIC, changed)
            server.refuse(known)
