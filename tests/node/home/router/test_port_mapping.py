"""Forwarded ports: which addresses are public, renewed leases, and a router that changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.home.router import port_mapping
from node.home.router.interface import RouterError
from node.home.router.nat_pmp import NatPmpRouter
from node.home.router.port_mapping import (
    NO_OFFER,
    Mapped,
    address_problem,
    is_behind_router,
    map_ports,
    offered,
)
from node.home.router.upnp import UpnpRouter
from protocol.trust.reachability import Addresses
from tests.support.nat_pmp_router import nat_pmp_responder

CLAIMED = Addresses("192.168.1.10:7710", "192.168.1.10:7711")
COORDINATOR = "44.10.0.1:7700"


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "100.64.3.4", "192.0.2.1", "0.0.0.0", "239.1.2.3", "168.63.129.16", "", "x" * 500]
)
def test_only_a_public_address_of_the_router_is_announced(address: str) -> None:
    assert address_problem(address)
    assert not address_problem("44.10.0.101")


async def test_ports_are_asked_for_only_between_a_home_and_the_internet() -> None:
    assert await is_behind_router("192.168.1.10", COORDINATOR)
    assert await is_behind_router("100.64.1.10", COORDINATOR)
    for local, coordinator in (
        ("44.10.0.7", COORDINATOR),
        ("192.168.1.10", "192.168.1.2:7700"),
        ("127.0.0.1", "localhost:7700"),
        ("fd00::7", "[2600::1]:7700"),
        ("not an address", COORDINATOR),
    ):
        assert not await is_behind_router(local, coordinator)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[NatPmpRouter]:
    """The routers of this network."""
    routers: list[NatPmpRouter] = []

    async def find_routers(local: str) -> list[NatPmpRouter]:
        assert local == "192.168.1.10"
        return routers

    monkeypatch.setattr(port_mapping, "find_routers", find_routers)
    return routers


async def test_ports_are_forwarded_renewed_and_given_back(found: list[NatPmpRouter]) -> None:
    async with nat_pmp_responder() as (responder, port):
        responder.lifetime, responder.shift = 600, 1
        found.append(await NatPmpRouter.find("127.0.0.1", port))
        now = asyncio.get_running_loop().time()
        mapping = (await map_ports(CLAIMED, "192.168.1.10", COORDINATOR)).mapping
        assert mapping is not None
        assert mapping.public(CLAIMED) == Addresses("44.10.0.101:7711", "44.10.0.101:7712")
        assert mapping.public(Addresses()) == Addresses()

        responder.shift = 0
        responder.forwarded.clear()
        assert not await mapping.refresh(now + 200)
        assert not responder.forwarded
        assert not await mapping.refresh(now + 400)  # after half of the lease; the ports stay as they are
        assert responder.forwarded == {7710: (7711, 600), 7711: (7712, 600)}

        responder.external = "44.10.0.200"
        assert await mapping.refresh(now + 401)
        assert mapping.public(CLAIMED) == Addresses("44.10.0.200:7711", "44.10.0.200:7712")
        responder.external = "10.0.0.1"
        with pytest.raises(RouterError, match="not public"):
            await mapping.refresh(now + 402)
        await mapping.release()
        assert not responder.forwarded


async def test_a_router_without_a_public_address_forwards_nothing(found: list[NatPmpRouter]) -> None:
    async with nat_pmp_responder() as (responder, port):
        responder.external = "100.64.7.8"
        found.append(await NatPmpRouter.find("127.0.0.1", port))
        mapped = await map_ports(CLAIMED, "192.168.1.10", COORDINATOR)
        assert not responder.forwarded
    assert mapped.mapping is None
    assert mapped.found == "the router offers NAT-PMP"
    assert await offered("192.168.1.10", COORDINATOR) == mapped
    assert "its own address 100.64.7.8 is not public" in mapped.problem


async def test_a_router_that_refuses_is_named_and_the_next_one_asked(found: list[NatPmpRouter]) -> None:
    async with nat_pmp_responder() as (responder, port), nat_pmp_responder() as (second, other):
        found.append(await NatPmpRouter.find("127.0.0.1", port))
        responder.problem = 4
        mapped = await map_ports(CLAIMED, "192.168.1.10", COORDINATOR)
        assert mapped.mapping is None
        assert "it has no port left" in mapped.problem
        found.append(await NatPmpRouter.find("127.0.0.1", other))
        assert (await map_ports(CLAIMED, "192.168.1.10", COORDINATOR)).mapping is not None
        assert set(second.forwarded) == {7710, 7711}


async def test_no_router_is_no_problem(found: list[NatPmpRouter]) -> None:
    mapped = await map_ports(CLAIMED, "192.168.1.10", COORDINATOR)
    assert (mapped.mapping, mapped.problem) == (None, "")
    assert mapped.found == NO_OFFER
    assert await offered("192.168.1.10", COORDINATOR) == mapped
    assert await map_ports(CLAIMED, "127.0.0.1", "127.0.0.1:7700") == Mapped()
    assert await map_ports(Addresses(), "192.168.1.10", COORDINATOR) == Mapped()


class Library:
    """What miniupnpc's object does, of a router that has `taken` ports and may give endless leases only."""

    lanaddr = "192.168.1.10"

    def __init__(self, *taken: int, is_endless_only: bool = False) -> None:
        self.taken, self.is_endless_only = set(taken), is_endless_only
        self.forwarded: dict[int, tuple[Any, ...]] = {}

    def addportmapping(self, external: int, *rest: Any) -> None:
        if external in self.taken:
            raise Exception("ConflictInMappingEntry")
        if self.is_endless_only and rest[-1]:
            raise Exception("OnlyPermanentLeasesSupported")
        self.forwarded[external] = rest

    def deleteportmapping(self, external: int, protocol: str) -> None:
        assert protocol == "TCP"
        del self.forwarded[external]


async def test_upnp_takes_another_port_and_an_endless_lease_if_it_must() -> None:
    library = Library(7710, is_endless_only=True)
    router = UpnpRouter(library)
    given = await router.forward(7710, 7710, 1200)
    assert given.external != 7710
    assert given.seconds == 0
    assert library.forwarded == {given.external: ("TCP", "192.168.1.10", 7710, "hetnode", "", 0)}
    await router.stop(given)
    assert not library.forwarded


async def test_upnp_failures_are_errors_of_the_router() -> None:
    with pytest.raises(RouterError, match="taken"):
        await UpnpRouter(Library(*range(65536))).forward(7710, 7710, 1200)
