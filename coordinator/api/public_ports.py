"""The public ports of the coordinator: they listen before anything is written or started."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from protocol.errors import ErrorCode, HetnodeError
from protocol.relay.ports import ports_after
from protocol.relay.server import RelayLimits
from protocol.server.descriptors import raise_descriptor_limit
from protocol.server.gateway import ConnectionLimits, Gateway, listen_on
from protocol.trust.host_port import host_port, split_host_port

log = logging.getLogger(__name__)

MAX_CONNECTIONS, MIN_CONNECTIONS = 8192, 64
SPARE_DESCRIPTORS = 512
"""Open files of the coordinator that are no connections of a public port."""


@dataclass(frozen=True)
class RelayOptions:
    """Where the coordinator's own relay listens.

    Attributes:
        listen: ``host:port``; "" takes the port after those of enrollment and the DHT peer, or a free one if
            that is taken.
        dht: the ports for the DHT peers of nodes; None takes :func:`ports_after` the relay's own.
        uplink: bytes per second that it can send for all nodes together; 0 if that is not known.
    """

    listen: str = ""
    dht: range | None = None
    uplink: float = 0.0


@dataclass(frozen=True)
class ListenAddresses:
    """Where the coordinator listens, as ``host:port``, and the host that it advertises.

    Port 0 takes a free port. `enrollment` None takes the port after that of `api`. `advertise` None
    advertises the host of `api`. `relay` None runs no relay. `one_port` lets enrollment and relay share the
    port of `api`. `metrics` None serves none. `dht_port` is left to the DHT peer, which starts later; 0 takes
    a free one. `dashboard` None serves none; `near_dashboard` takes one of the next ports if that is taken.
    """

    api: str
    enrollment: str | None = None
    advertise: str | None = None
    relay: RelayOptions | None = None
    one_port: bool = False
    metrics: str | None = None
    dht_port: int = 0
    dashboard: str | None = None
    near_dashboard: bool = False


@dataclass(frozen=True)
class RelayPorts:
    """The gateway of the coordinator's relay, its ports for DHT peers, and its address for nodes."""

    gateway: Gateway
    dht: range
    address: str


@dataclass(frozen=True)
class PublicPorts:
    """The gateways of the API and of enrollment, and their advertised addresses; `relay` if there is one.

    All three may share one gateway.
    """

    api: Gateway
    enrollment: Gateway
    advertised: tuple[str, str]
    relay: RelayPorts | None

    @property
    def is_shared(self) -> bool:
        return self.api is self.enrollment


def open_ports(addresses: ListenAddresses, stack: AsyncExitStack) -> PublicPorts:
    """Listen on all ports; `stack` closes them. Raises HetnodeError BAD_ADDRESS, PORT_IN_USE."""
    host, port = _split(addresses.api)
    api = _listener(addresses.api)
    stack.callback(api.close)
    if addresses.one_port:
        return _one_port(addresses, api)
    newcomers_at = addresses.enrollment or host_port(host, port and port + 1)
    newcomers = _listener(newcomers_at)
    stack.callback(newcomers.close)
    # A connection takes three descriptors: two of its gateway and one of gRPC. All ports get as many.
    most = _most_connections(6 if addresses.relay is None else 9)
    limits = ConnectionLimits(open_in_all=most)
    gateways = Gateway(api, limits), Gateway(newcomers, limits)
    hosts = (addresses.advertise or _split(at)[0] for at in (addresses.api, newcomers_at))
    addressed = [host_port(host, gateway.port) for host, gateway in zip(hosts, gateways, strict=True)]
    relay = None
    if addresses.relay is not None:
        relay = _relay_ports(addresses, addresses.relay, gateways[1].port, most, stack)
    return PublicPorts(*gateways, (addressed[0], addressed[1]), relay)


def _relay_ports(
    addresses: ListenAddresses,
    options: RelayOptions,
    enrollment_port: int,
    most_connections: int,
    stack: AsyncExitStack,
) -> RelayPorts:
    host, api_port = _split(options.listen or addresses.api)
    if options.listen:
        listener = _listener(options.listen)
    else:
        after = enrollment_port + 1
        if after == addresses.dht_port:
            after += 1
        listener = _listener_near(host, after if api_port else 0)
    stack.callback(listener.close)
    port = int(listener.getsockname()[1])
    limits = replace(RelayLimits().connections, open_in_all=most_connections)
    address = host_port(addresses.advertise or host, port)
    return RelayPorts(Gateway(listener, limits), options.dht or ports_after(port), address)


def _one_port(addresses: ListenAddresses, listener: socket.socket) -> PublicPorts:
    """One gateway for all."""
    gateway = Gateway(listener, ConnectionLimits(open_in_all=_most_connections(3)))
    address = host_port(addresses.advertise or _split(addresses.api)[0], gateway.port)
    options = addresses.relay or RelayOptions()
    relay = RelayPorts(gateway, options.dht or ports_after(gateway.port), address)
    return PublicPorts(gateway, gateway, (address, address), relay)


def _most_connections(descriptors_each: int) -> int:
    most = (raise_descriptor_limit() - SPARE_DESCRIPTORS) // descriptors_each
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, most))


def _listener_near(host: str, port: int) -> socket.socket:
    """As :func:`_listener`, on a free port if `port` is taken."""
    try:
        return _listener(host_port(host, port))
    except HetnodeError as error:
        if error.code is not ErrorCode.PORT_IN_USE:
            raise
        log.warning("the relay takes a free port: port %d is taken", port)
        return _listener(host_port(host, 0))


def _listener(listen: str) -> socket.socket:
    """A socket that listens at `listen`. Raises BAD_ADDRESS, or PORT_IN_USE for a port that is not free."""
    host, port = _split(listen)
    try:
        return listen_on(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(listen) from None
        raise _bad_address(listen, error.strerror or str(error)) from None


def _split(listen: str) -> tuple[str, int]:
    try:
        return split_host_port(listen)
    except ValueError as error:
        raise _bad_address(listen, str(error)) from None


def _bad_address(listen: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_ADDRESS,
        f"The coordinator cannot listen on '{listen}': {why}.",
        "Give an address of this machine, like 127.0.0.1:7700, or [::]:7700 for all of them.",
    )


def _in_use(listen: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.PORT_IN_USE,
        f"Another program already listens on {listen}.",
        "Stop it, or give this coordinator another port; port 0 takes a free port.",
    )
