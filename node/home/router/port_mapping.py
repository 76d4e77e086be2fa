"""Ports that a home's router forwards to this node: asked for when it joins, renewed while it stays."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, ip_address

from node.home.router.gateway import default_gateway
from node.home.router.interface import Forwarding, Router, RouterError
from node.home.router.nat_pmp import NatPmpRouter
from node.home.router.upnp import UpnpRouter
from protocol.trust.endpoints import check_address, split_endpoint
from protocol.trust.host_port import host_port
from protocol.trust.reachability import Addresses

_LEASE_SECONDS = 1200
"""So that a router that restarts forwards again soon, and forgets a killed node soon."""
NO_OFFER = "no router here forwards ports on request (UPnP, NAT-PMP)"
_SEARCH_SECONDS, _FORWARD_SECONDS, _STOP_SECONDS = 3.0, 5.0, 2.0


class PortMapping:
    """What one router forwards to this machine, since `now`, a time of the event loop.

    Attributes:
        router: that forwards.
        address: on the internet.
    """

    def __init__(self, router: Router, forwardings: Sequence[Forwarding], now: float) -> None:
        self.router, self.address = router, router.external
        self._forwardings = {each.internal: each for each in forwardings}
        self._renew_at = now + self._half_lease

    def public(self, claimed: Addresses) -> Addresses:
        """`claimed`, addresses of this machine, as others reach them."""
        return replace(claimed, endpoint=self._public(claimed.endpoint), dht=self._public(claimed.dht))

    def _public(self, address: str) -> str:
        if not address:
            return ""
        _, port = split_endpoint(address)
        return host_port(self.address, self._forwardings[port].external)

    async def refresh(self, now: float) -> bool:
        """Renew if half of the lease is over, or the router has another address on the internet.

        Returns whether public addresses have changed. Raises RouterError; then call it again soon.
        """
        before = self._places
        try:
            async with asyncio.timeout(_FORWARD_SECONDS):
                address = await self.router.external_address()
                if problem := address_problem(address):
                    raise RouterError(problem)
                if address != self.address or now >= self._renew_at:
                    for each in list(self._forwardings.values()):
                        renewed = await self.router.forward(each.internal, each.external, _LEASE_SECONDS)
                        self._forwardings[each.internal] = renewed
                    self.address, self._renew_at = address, now + self._half_lease
        except TimeoutError:
            raise RouterError("it does not answer") from None
        return before != self._places

    @property
    def _places(self) -> Sequence[tuple[str, int]]:
        return [(self.address, each.external) for each in self._forwardings.values()]

    @property
    def _half_lease(self) -> float:
        leases = (each.seconds or _LEASE_SECONDS for each in self._forwardings.values())
        return min([_LEASE_SECONDS, *leases]) / 2

    async def release(self) -> None:
        """Ask the router to forward no more; what it does not take ends with its lease."""
        with suppress(RouterError, TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                for each in self._forwardings.values():
                    await self.router.stop(each)


@dataclass(frozen=True)
class Mapped:
    """What came of asking the router.

    Attributes:
        mapping: None if nothing is forwarded.
        found: what the router offers, for people; "" if none was asked, as there is none in between.
        problem: what keeps it from forwarding ports, for people.
    """

    mapping: PortMapping | None = None
    found: str = ""
    problem: str = ""


async def offered(local: str, coordinator: str) -> Mapped:
    """As :func:`map_ports`, but nothing is forwarded."""
    if not await is_behind_router(local, coordinator):
        return Mapped()
    routers = await find_routers(local)
    problems = dict.fromkeys(filter(None, (address_problem(each.external) for each in routers)))
    return Mapped(None, _offer(routers), ", and ".join(problems))


def _offer(routers: Sequence[Router]) -> str:
    if not routers:
        return NO_OFFER
    return f"the router offers {' and '.join(each.protocol for each in routers)}"


async def map_ports(claimed: Addresses, local: str, coordinator: str) -> Mapped:
    """Let the router forward the ports of `claimed` to this machine, if there is one in between.

    Takes 3 s where no router answers.

    Args:
        local: this machine's address towards the coordinator.
        coordinator: ``host:port``.
    """
    ports = [split_endpoint(address)[1] for address in (claimed.endpoint, claimed.dht) if address]
    if not ports or not await is_behind_router(local, coordinator):
        return Mapped()
    routers = await find_routers(local)
    problems = []
    for router in routers:
        if problem := address_problem(router.external):
            problems.append(problem)
            continue
        try:
            mapping = await _forward_all(router, ports)
        except RouterError as error:
            problems.append(f"it refuses to forward ports ({error})")
        else:
            used = f"the router forwards ports of {mapping.address} to this machine ({router.protocol})"
            return Mapped(mapping, used)
    return Mapped(None, _offer(routers), ", and ".join(dict.fromkeys(problems)))


async def is_behind_router(local: str, coordinator: str) -> bool:
    """Whether this machine has a private IPv4 address, and the coordinator at ``host:port`` a public one."""
    try:
        host, port = split_endpoint(coordinator)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        own, its = ip_address(local), [ip_address(at[0]) for *_, at in found]
    except (OSError, ValueError):
        return False
    return own.version == 4 and not own.is_global and any(each.is_global for each in its)


async def find_routers(local: str) -> list[Router]:
    """What the router of this network offers, NAT-PMP before UPnP. Takes 3 s if one of them is not offered.

    `local` is this machine's address in that network.
    """
    found = await asyncio.gather(_found(_find_nat_pmp()), _found(UpnpRouter.find(local)))
    return [router for router in found if router is not None]


async def _found(search: Awaitable[Router]) -> Router | None:
    with suppress(RouterError, TimeoutError):
        async with asyncio.timeout(_SEARCH_SECONDS):
            return await search
    return None


async def _find_nat_pmp() -> Router:
    gateway = await default_gateway()
    if gateway is None:
        raise RouterError("this machine has no default gateway")
    return await NatPmpRouter.find(gateway)


async def _forward_all(router: Router, ports: Sequence[int]) -> PortMapping:
    """Raises RouterError; then nothing is forwarded."""
    forwardings: list[Forwarding] = []
    now = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(_FORWARD_SECONDS):
            for port in ports:
                forwardings.append(await router.forward(port, port, _LEASE_SECONDS))
    except (RouterError, TimeoutError) as error:
        await PortMapping(router, forwardings, now).release()
        raise RouterError(str(error) or "no answer") from None
    return PortMapping(router, forwardings, now)


def address_problem(external: str) -> str:
    """Why the internet does not reach a router at its own address `external`; "" if that is public."""
    try:
        address = ip_address(external)
    except ValueError:
        return f"it does not know its address on the internet ({external!r:.60})"
    if isinstance(address, IPv4Address) and address.is_global:
        try:
            check_address(address)
        except ValueError as error:
            return str(error)
        return ""
    return (
        f"its own address {address} is not public (the provider, or another router, has several homes behind "
        "one address)"
    )
