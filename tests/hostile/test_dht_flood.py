"""Floods of the DHT by a stranger at the address of a member: real processes, on loopback."""

from __future__ import annotations

import asyncio
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
    try:
        await member.transport.publish(record_of(honest), ttl=600)
        await first.lookup()
        rest = resident(first)
        stranger = str(open_identity(tmp_path / "stranger.key").path)
        flood = asyncio.create_task(
            asyncio.to_thread(
                commands.run, "tests.support.hive_attacker", attack, first.addresses[0], stranger
            )
        )
        most, published = dict(rest), 0
        while not flood.done():
            await member.transport.publish(record_of(honest), ttl=600 + published)
            published += 1
            await asyncio.wait({flood}, timeout=0.2)
            now = resident(first)
            assert now.keys() == rest.keys(), "the processes are the same"
            most = {process: max(size, now[process]) for process, size in most.items()}
        growth = {process.name(): f"{(most[process] - rest[process]) >> 20} MiB" for process in rest}
        print(f"{flood.result().stdout.strip()}; {published} records published meanwhile; growth: {growth}")
        assert all(most[process] < rest[process] + MOST_GROWTH for process in rest)
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
        rest = resident(node.transport)
        member = str(open_identity(tmp_path / "member.key").path)
        attack = ("tests.support.hive_attacker", "flood-libp2p", node.transport.addresses[0], member)
        flood = asyncio.create_task(asyncio.to_thread(commands.run, *attack))
        most = dict(rest)
        while not flood.done():
            await asyncio.wait({flood}, timeout=0.2)
            now = resident(node.transport)
            assert now.keys() == rest.keys(), "the processes are the same"
            most = {process: max(size, now[process]) for process, size in most.items()}
        growth = {process.name(): f"{(most[process] - rest[process]) >> 20} MiB" for process in rest}
        print(f"{flood.result().stdout.strip()}; growth: {growth}")
        assert all(most[process] < rest[process] + MOST_GROWTH for process in rest)
    finally:
        await node.transport.close()
        await first.transport.close()


def resident(transport: HiveTransport) -> dict[psutil.Process, int]:
    """Resident bytes of the host and of the processes below it, p2pd among them."""
    host = psutil.Process(transport.pid)
    return {each: each.memory_info().rss for each in (host, *host.children(recursive=True))}
