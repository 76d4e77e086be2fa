"""The public ports of the coordinator: they listen before anything is written or started."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from protocol.errors import ErrorCode, HetnodeError
from protocol.server.descriptors import raise_descriptor_limit
from protocol.server.gateway import ConnectionLimits, Gateway, listen_on
from protocol.trust.host_port import host_port, split_host_port

log = logging.getLogger(__name__)

_DIAL_SECONDS = 5.0
MAX_CONNECTIONS, MIN_CONNECTIONS = 8192, 64
SPARE_DESCRIPTORS = 512
"""Open files of the coordinator that are no connections of a public port."""


@dataclass(frozen=True)
class RelayOptions:
    """Where the coordinator's own relay listens.

    Attributes:
        listen: ``host:port``; "" takes the port after those of enrollment and the DHT peer, or a free one if
            that is taken.
        dht: the ports for the DHT peers of nodes; None takes those after the relay's own.
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
    `contact` tells newcomers how to ask for an invite. `objects` is an object store, s3://BUCKET/PREFIX.
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
    contact: str = ""
    objects: str = ""


@dataclass(frozen=True)
class PublicPorts:
    """The gateways of the API and of enrollment, which may be one, and their advertised addresses."""

    api: Gateway
    enrollment: Gateway
    advertised: tuple[str, str]

    @property
    def is_shared(self) -> bool:
        return self.api is self.enrollment


def open_ports(addresses: ListenAddresses, stack: AsyncExitStack) -> PublicPorts:
    """Listen on all ports; `stack` closes them. Raises HetnodeError BAD_ADDRESS, PORT_IN_USE."""
    host, port = split_listen(addresses.api)
    api = listen(addresses.api)
    stack.callback(api.close)
    if addresses.one_port:
        shared = Gateway(api, ConnectionLimits(open_in_all=_most_connections(3)))
        address = host_port(addresses.advertise or host, shared.port)
        return PublicPorts(shared, shared, (address, address))
    newcomers_at = addresses.enrollment or host_port(host, port and port + 1)
    newcomers = listen(newcomers_at)
    stack.callback(newcomers.close)
    # A connection takes three descriptors: two of its gateway and one of gRPC. All ports get as many.
    limits = ConnectionLimits(open_in_all=_most_connections(6 if addresses.relay is None else 9))
    gateways = Gateway(api, limits), Gateway(newcomers, limits)
    hosts = (addresses.advertise or split_listen(at)[0] for at in (addresses.api, newcomers_at))
    addressed = [host_port(host, gateway.port) for host, gateway in zip(hosts, gateways, strict=True)]
    return PublicPorts(*gateways, (addressed[0], addressed[1]))


def _most_connections(descriptors_each: int) -> int:
    most = (raise_descriptor_limit() - SPARE_DESCRIPTORS) // descriptors_each
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, most))


def listen(address: str) -> socket.socket:
    """A socket that listens at `address`. Raises BAD_ADDRESS, or PORT_IN_USE for a port that is not free."""
    host, port = split_listen(address)
    try:
        return listen_on(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise HetnodeError(
                ErrorCode.PORT_IN_USE,
                f"Another program already listens on {address}.",
                "Stop it, or give this coordinator another port; port 0 takes a free port.",
            ) from None
        raise _bad_address(address, error.strerror or str(error)) from None


def split_listen(address: str) -> tuple[str, int]:
    """Host and port of an address of this machine. Raises BAD_ADDRESS."""
    try:
        return split_host_port(address)
    except ValueError as error:
        raise _bad_address(address, str(error)) from None


def _bad_address(listen: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_ADDRESS,
        f"The coordinator cannot listen on '{listen}': {why}.",
        "Give an address of this machine, like 127.0.0.1:7700, or [::]:7700 for all of them.",
    )


def warn_of_unreached(addresses: Iterable[str]) -> None:
    """Warn of addresses of this coordinator that this machine cannot reach: invites will contain them."""
    for address in addresses:
        try:
            socket.create_connection(split_host_port(address), _DIAL_SECONDS).close()
        except OSError as error:
            log.warning(
                "this machine does not reach itself at %s: %s. Check --advertise and the router's ports "
                "before you send an invite; behind some routers the home's own address cannot be called",
                address,
                error,
            )
