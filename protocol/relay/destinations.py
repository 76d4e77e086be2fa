"""Where a relay connects to for the peers behind it, so that it is no way into other machines or networks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import ip_address

from protocol.server.limits import source_of_host
from protocol.trust.endpoints import check_address, split_endpoint
from protocol.trust.host_port import host_port
from protocol.trust.reachability import address_obstacle, port_obstacle


@dataclass(frozen=True)
class Destinations:
    """The members of the run, and a few ports of this machine.

    Attributes:
        members: sources from which members have called.
        hosts: names and addresses under which nodes know this machine.
        ports: of this machine, besides those of the relay itself.
    """

    members: Callable[[], Collection[str]]
    hosts: Collection[str] = ()
    ports: Collection[int] = ()

    async def place(self, address: str, caller: str, own_ports: Collection[int]) -> tuple[str, int]:
        """Host and port of `address`, for a caller from the source `caller`.

        Raises ConnectionRefusedError if the relay does not connect to it.
        """
        try:
            host, port = split_endpoint(address)
            check_address(ip_address(host))
            if "%" in host:
                raise ValueError(f"{host!r} names an interface of this machine")
        except ValueError as error:
            raise ConnectionRefusedError(str(error)) from None
        source = source_of_host(host)
        if _is_of_this_machine(host) or source in await self._own_sources():
            if port in self.ports or port in own_ports:
                return host, port
            raise ConnectionRefusedError(f"port {port} of the relay's own machine is not for nodes")
        if source not in self.members():
            raise ConnectionRefusedError(f"no member of the run calls from {host}")
        if obstacle := port_obstacle(host_port(host, port)) or address_obstacle(host, caller):
            raise ConnectionRefusedError(obstacle)
        return host, port

    async def _own_sources(self) -> set[str]:
        """Behind a router, this machine does not know the addresses to which its names lead."""
        found: set[str] = set()
        for name in self.hosts:
            try:
                known = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except OSError:
                continue
            found |= {source_of_host(str(address[0])) for *_, address in known}
        return found


def _is_of_this_machine(host: str) -> bool:
    """Only addresses of this machine can be bound. Sends nothing."""
    family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
