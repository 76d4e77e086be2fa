"""Floods of the DHT by a stranger at the address of a member: real processes, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import psutil
import pytest

from node.exchange.hive.transport import HiveTransport
from node.security.identity import open_identity
from tests.hostile.measure import MOST_GROWTH
from tests.support import commands
from tests.support.hive_nodes import entry_of, record_of, start_as, start_transport

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize("attack", ["flood", "flood-libp2p"])
async def test_large_calls_of_a_stranger_take_no_memory(tmp_path: Path, attack: str) -> None:
    identity, honest = (open_identity(tmp_path / f"{name}.key") for name in ("first", "member"))
    first = await start_transport(identity, entry_of(identity, members=(honest.peer,)))
    member = await start_as(honest, tmp_path / "member", (), first.addresses)
    ttls = count(600)

    async def publish() -> None:
        await member.transport.publish(record_of(honest), ttl=next(ttls))

    try:
        await publish()
        await first.lookup()
        await assert_no_growth(first, attack, tmp_path / "stranger.key", publish)
        assert honest.peer in await first.lookup()
    finally:
        await member.transport.close()
        await first.close()


async def test_large_questions_of_a_member_to_the_dht_of_libp2p_take_no_memory_of_a_node(
    tmp_path: Path,
) -> None:
    first = await start_as(open_identity(tmp_path / "first.key"), tmp_path / "first", ())
    node = await start_as(
        open_identity(tmp_path / "node.key"), tmp_path / "node", (), first.transport.addresses
    )
    try:
        await assert_no_growth(node.transport, "flood-libp2p", tmp_path / "member.key")
    finally:
        await node.transport.close()
        await first.transport.close()


async def nothing() -> None:
    pass


async def assert_no_growth(
    target: HiveTransport, attack: str, key: Path, meanwhile: Callable[[], Awaitable[None]] = nothing
) -> None:
    """Attack the peer, and do `meanwhile` again and again: none of its processes ends or grows much."""
    rest = resident(target)
    attacker = ("tests.support.hive_attacker", attack, target.addresses[0], str(open_identity(key).path))
    flood = asyncio.create_task(asyncio.to_thread(commands.run, *attacker))
    most = dict(rest)
    while not flood.done():
        await meanwhile()
        await asyncio.wait({flood}, timeout=0.2)
        now = resident(target)
        assert now.keys() == rest.keys(), "the processes are the same"
        most = {process: max(size, now[process]) for process, size in most.items()}
    growth = {process.name(): f"{(most[process] - rest[process]) >> 20} MiB" for process in rest}
    print(f"{flood.result().stdout.strip()}; growth: {growth}")
    assert all(most[process] < rest[process] + MOST_GROWTH for process in rest)


def resident(transport: HiveTransport) -> dict[psutil.Process, int]:
    """Resident bytes of the host and of the processes below it, p2pd among them."""
    host = psutil.Process(transport.pid)
    return {each: each.memory_info().rss for each in (host, *host.children(recursive=True))}
