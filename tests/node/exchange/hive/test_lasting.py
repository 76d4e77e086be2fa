"""The processes of hivemind are started again when one of them dies: real processes, on loopback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from node.exchange.hive.transport import start
from node.exchange.transport import Entry
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from tests.support import commands
from tests.support.hive_nodes import (
    BRIEF,
    Node,
    canonical,
    certified,
    entry_of,
    gone,
    record_of,
    start_as,
    start_node,
    start_transport,
)


@asynccontextmanager
async def running(
    identity: Identity, folder: Path, stages: Sequence[int], initial_peers: Sequence[str] = ()
) -> AsyncIterator[Node]:
    node = await start_as(identity, folder, stages, initial_peers)
    try:
        yield node
    finally:
        await node.transport.close()


def victim(node: Node, name: str) -> psutil.Process:
    host, dht = node.processes[:2]
    return {"host": host, "DHT": dht, "p2pd": dht.children()[0]}[name]


@pytest.mark.parametrize("name", ["host", "DHT", "p2pd"])
async def test_members_find_the_first_peer_again(tmp_path: Path, name: str) -> None:
    async with running(open_identity(tmp_path / "first.key"), tmp_path, ()) as first:
        addresses = first.transport.addresses
        banned = open_identity(tmp_path / "banned.key")
        await first.transport.admit((), [banned.peer])
        member = await start_node(tmp_path, "member", (), addresses)
        try:
            family = first.processes
            victim(first, name).kill()
            await gone(family)
            # Waits for the new processes; the member greets them at the same address.
            await first.transport.lookup()
            assert first.transport.addresses == addresses
            await member.transport.publish(record_of(member.identity), ttl=600)
            assert member.identity.peer in await first.transport.lookup()
            with pytest.raises(HetnodeError) as refused:
                await start_transport(banned, entry_of(banned, initial_peers=addresses))
            assert refused.value.code is ErrorCode.DHT_UNREACHABLE
        finally:
            await member.transport.close()


async def test_a_restart_while_the_processes_start_begins_again(tmp_path: Path) -> None:
    """They were given the address of before."""
    identity, begun, go = open_identity(tmp_path / "a.key"), asyncio.Event(), asyncio.Event()
    entry, entered = entry_of(identity), []

    async def enter() -> Entry:
        entered.append(entry)
        if len(entered) == 2:
            begun.set()
            await go.wait()
        return entry

    transport = await start(identity, enter)
    try:
        await transport.restart()
        await begun.wait()
        entry = entry_of(identity, advertise="127.0.0.2")
        await transport.restart()
        go.set()
        await transport.lookup()
        assert [each.advertise for each in entered] == [None, None, "127.0.0.2"]
    finally:
        await transport.close()


async def test_a_greeting_connects_to_a_peer_of_which_only_the_address_is_known(tmp_path: Path) -> None:
    """As after the restart of the first peer, which then knows no other one."""
    first = await start_node(tmp_path, "first", ())
    greeter = open_identity(tmp_path / "greeter.key")
    shown = certified(greeter)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    try:
        files = (greeter.path, shown["certificate"], shown["authority"], sockets)
        arguments = (first.transport.addresses[0], greeter.peer, *map(str, files))
        result = await asyncio.to_thread(commands.run, "tests.support.hive_greeter", *arguments)
        before, after = result.stdout.split("\n")[:2]
        assert (before, after) == ("", first.identity.peer), result
    finally:
        await first.transport.close()


async def test_a_member_goes_on_when_a_process_dies_in_a_round(tmp_path: Path) -> None:
    bob = await start_node(tmp_path, "bob", (0,))
    identity = open_identity(tmp_path / "alice.key")
    try:
        async with running(identity, tmp_path / "alice", (0,), bob.transport.addresses) as alice:
            members = [identity.peer, bob.identity.peer]
            for node in (alice, bob):
                await node.transport.admit(members)
            await gathered(alice, bob, round_number=1)

            payload = os.urandom(1000)
            own, theirs = (node.descriptor(payload, 0, 2) for node in (alice, bob))
            waiting = asyncio.create_task(alice.exchange(payload, own, [own, theirs]))
            await alice.transport.lookup()  # by then the exchange has reached the host, too
            victim(alice, "p2pd").kill()
            # The exchange of the killed processes is made again by the new ones.
            await bob.exchange(payload, theirs, [own, theirs])
            held = await waiting
            assert own in held

            await gathered(alice, bob, round_number=3)
    finally:
        await bob.transport.close()


async def test_a_round_without_processes_is_lost_and_closing_ends_the_attempts(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "alice.key")
    async with running(identity, tmp_path / "alice", (0,)) as alice:
        family = alice.processes
        own = alice.descriptor(b"payload", 0, 1)
        victim(alice, "host").kill()
        await gone(family)
        assert await alice.exchange(b"payload", own, [own], BRIEF) == (own,)
        family = alice.processes
    await gone(family)


async def gathered(alice: Node, bob: Node, round_number: int) -> None:
    payload = os.urandom(100_000)
    group = canonical([node.descriptor(payload, 0, round_number) for node in (alice, bob)])
    held = await asyncio.gather(
        *(node.exchange(payload, node.descriptor(payload, 0, round_number), group) for node in (alice, bob))
    )
    assert held == [group, group]
