"""What a node claims while its router forwards ports, and whom it tells when that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from node.home.router import port_mapping
from node.home.router.forwarded_ports import ForwardedPorts
from node.home.router.nat_pmp import NatPmpRouter
from node.net.addresses import ClaimedPorts
from protocol.trust.reachability import Addresses, Reached
from protocol.types import Reachability
from tests.support.nat_pmp_router import NatPmpResponder, nat_pmp_responder
from tests.support.waiting import until

HERE = "192.168.1.10"
OWN = Addresses(f"{HERE}:7710", f"{HERE}:7711")
RELAYED = Addresses("44.10.0.9:7702", "44.10.0.9:7803", relayed=True)


class Others:
    """Coordinator, transport and directory of a node: they note what they are told."""

    address = "44.10.0.1:7700"

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def update_addresses(self, addresses: Addresses) -> Reached:
        self.told.append(addresses)
        return Reached(Reachability.OPEN, True, True)

    async def restart(self) -> None:
        self.told.append("restarted")

    async def move(self, endpoint: str, dht: str) -> None:
        self.told.append(endpoint)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatPmpResponder]:
    async with nat_pmp_responder() as (responder, port):

        async def find_routers(local: str) -> list[NatPmpRouter]:
            return [await NatPmpRouter.find("127.0.0.1", port)]

        monkeypatch.setattr(port_mapping, "find_routers", find_routers)
        yield responder


def claiming() -> ClaimedPorts:
    ports = ClaimedPorts(HERE, "0.0.0.0", 7711)
    ports.addresses = OWN
    return ports


async def test_the_public_ports_are_claimed_and_a_new_address_is_told(router: NatPmpResponder) -> None:
    ports, others = claiming(), Others()
    forwarded = ForwardedPorts(others, ports, True, look_seconds=0.05)
    async with AsyncExitStack() as stack:
        await forwarded.open(HERE, stack)
        assert ports.addresses == Addresses("44.10.0.101:7710", "44.10.0.101:7711")
        keeping = asyncio.create_task(forwarded.keep(others, others))
        router.external = "44.10.0.200"
        await until(lambda: len(others.told) == 3, 30, "the new address")
        keeping.cancel()
        assert ports.addresses == Addresses("44.10.0.200:7710", "44.10.0.200:7711")
        assert others.told == [ports.addresses, "restarted", "44.10.0.200:7710"]
        assert set(router.forwarded) == {7710, 7711}
    assert not router.forwarded


async def test_a_node_that_takes_a_relay_gives_its_ports_back(router: NatPmpResponder) -> None:
    ports, others = claiming(), Others()
    forwarded = ForwardedPorts(others, ports, True, look_seconds=0.05)
    async with AsyncExitStack() as stack:
        await forwarded.open(HERE, stack)
        ports.addresses = RELAYED  # nobody reached the forwarded ports
        keeping = asyncio.create_task(forwarded.keep(others, others))
        await until(lambda: not router.forwarded, 30, "ports that are not forwarded")
        keeping.cancel()
        assert (ports.addresses, others.told) == (RELAYED, [])


async def test_no_router_is_asked_against_the_owners_wish(router: NatPmpResponder) -> None:
    ports = claiming()
    async with AsyncExitStack() as stack:
        await ForwardedPorts(Others(), ports, False).open(HERE, stack)
    assert (ports.addresses, router.requests) == (OWN, 0)
