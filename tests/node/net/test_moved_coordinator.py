"""A node finds a coordinator that has moved by what that publishes, and leaves none that answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.net import moved_coordinator
from node.net.coordinator_client import CoordinatorClient
from node.net.joining import obtain_credentials
from node.net.moved_coordinator import follow_coordinator
from node.net.waiting import CoordinatorWait
from node.security import credentials as kept
from node.security.identity import open_identity
from protocol.trust.reachability import Addresses
from protocol.types import Capacity, Role
from tests.builders import spec_of
from tests.support.coordinator_process import running
from tests.support.ports import free_port
from tests.virtual.loop import run


class Surroundings:
    """What a node knows: for how long its coordinator is away, and the endpoints in the DHT."""

    def __init__(self, **endpoints: str) -> None:
        self.away, self.looks, self._endpoints = 1.0, 0, endpoints
        self.looked = asyncio.Condition()

    async def endpoints(self) -> dict[str, str]:
        async with self.looked:
            self.looks += 1
            self.looked.notify_all()
        return self._endpoints

    async def until_looks(self, count: int) -> None:
        async with asyncio.timeout(60), self.looked:
            await self.looked.wait_for(lambda: self.looks >= count)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_coordinator, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(moved_coordinator, "LONGEST_SECONDS", 0.01)
    monkeypatch.setattr(moved_coordinator, "LOOK_TOLD_SECONDS", 0.01)


@asynccontextmanager
async def following(client: CoordinatorClient, around: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(follow_coordinator(client, around, around, around))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def client_in(stack: AsyncExitStack, tmp_path: Path) -> CoordinatorClient:
    """Of a node whose coordinator has ended since."""
    identity = open_identity(tmp_path / "node.key")
    async with running(spec_of(), tmp_path / "run") as before:
        found = await obtain_credentials(await before.invite(), "", identity, CoordinatorWait(60))
    found.remember(Role.REPLICA, "Ada")
    client = CoordinatorClient(found, identity)
    stack.push_async_callback(client.close)
    return client


async def test_a_moved_coordinator_is_found_and_remembered(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        client = await client_in(stack, tmp_path)
        first = client.credentials
        other = f"127.0.0.1:{free_port()}"
        after = await stack.enter_async_context(running(spec_of(), tmp_path / "run", other))
        around = Surroundings(**{"another": "127.0.0.1:1", first.coordinator: after.address})
        async with asyncio.timeout(60), following(client, around):
            while client.credentials.api == first.api:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0.05)
        moved = replace(first, api=after.address, others=(first.api,))  # it may come back
        assert client.credentials == moved
        assert kept.load(first.folder) == replace(moved, role=Role.REPLICA, name="Ada")
        joined = await client.join(None, Capacity("cpu", 10**9, 2), Addresses(), "", 20.0)
        assert joined.spec == after.spec


async def test_nobody_else_is_followed_there(tmp_path: Path) -> None:
    """Neither the coordinator of another run, nor an address at which nobody answers."""
    async with AsyncExitStack() as stack:
        client = await client_in(stack, tmp_path)
        first = client.credentials
        stranger = await stack.enter_async_context(running(spec_of(rounds=7), tmp_path / "other"))
        for address in (stranger.address, f"127.0.0.1:{free_port()}"):
            around = Surroundings(**{first.coordinator: address})
            async with following(client, around):
                await around.until_looks(3)
        assert kept.load(first.folder).api == first.api
        assert client.credentials == first


async def test_a_coordinator_that_answers_is_not_left(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        client = await client_in(stack, tmp_path)
        first = client.credentials
        await stack.enter_async_context(running(spec_of(), tmp_path / "run", first.api))
        around = Surroundings(**{first.coordinator: "127.0.0.1:1"})
        async with following(client, around):
            await around.until_looks(3)
        assert client.credentials == first


def test_the_dht_is_asked_while_the_coordinator_is_away_and_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()

    async def main() -> None:
        around: Any = Surroundings()
        client: Any = SimpleNamespace(
            credentials=SimpleNamespace(api="known:1", coordinator="coordinator", others=())
        )
        around.away = 0.0
        async with following(client, around):
            await asyncio.sleep(3600)
            assert around.looks == 0
            around.away = 1.0
            await asyncio.sleep(60)
            assert around.looks >= 2
            await asyncio.sleep(86_400)
            assert around.looks < 450

    run(main())
