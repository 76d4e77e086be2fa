"""Which relay a node takes, and what it does when that relay is gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from node.home.relay.keeper import Exposure, RelayKeeper
from node.net.peer_address import round_trip
from protocol.relay.exposed import RelayedService
from protocol.types import PeerId, RelayAddress
from tests.support.certificates import credentials
from tests.support.relays import RELAY, address_of, relaying, serving

HOME = PeerId("home")


def keeper(*relays: RelayAddress, patience: float = 8.0) -> RelayKeeper:
    own = credentials(HOME)
    servers = {service: lambda: ("127.0.0.1", 9) for service in RelayedService}
    return RelayKeeper(HOME, lambda: own, servers, lambda: relays, patience)


async def test_a_relay_that_answers_is_taken_and_others_are_left_out() -> None:
    closed = RelayAddress(PeerId("closed"), "127.0.0.1:1")

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with relaying() as relay, serving(say_nothing) as port:
        silent = RelayAddress(PeerId("silent"), f"127.0.0.1:{port}")
        taken = keeper(closed, silent, address_of(relay))
        exposure = await taken.connect()
        assert exposure is not None
        assert exposure.endpoint == f"127.0.0.1:{relay.port}"
        assert await asyncio.open_connection(*exposure.dht.split(":"))
        taken.close()
    assert await keeper(closed).connect() is None
    assert await keeper().connect() is None


async def test_a_relay_that_nobody_may_have_is_not_dialled() -> None:
    assert await round_trip("169.254.169.254:80", "a relay") == float("inf")


async def test_another_relay_is_taken_when_one_is_gone() -> None:
    news: asyncio.Queue[Exposure] = asyncio.Queue()
    async with AsyncExitStack() as one, AsyncExitStack() as other:
        owners = {
            f"127.0.0.1:{relay.port}": stack
            for stack in (one, other)
            for relay in [await stack.enter_async_context(relaying())]
        }
        keeping = keeper(*(RelayAddress(RELAY, endpoint) for endpoint in owners), patience=0.5)
        exposure = await keeping.connect()
        assert exposure is not None
        task = asyncio.create_task(keeping.keep(exposure, news.put))
        await owners.pop(exposure.endpoint).aclose()
        changed = await news.get()
        assert [changed.endpoint] == list(owners)
        task.cancel()
        keeping.close()
