"""Random bytes at every call that hivemind's processes answer, from a peer that is a member of the run."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from node.security.identity import open_identity
from tests.support import commands
from tests.support.hive_nodes import RUN, Node, canonical, start_node
from tests.support.hive_noise import TIMES

MOST_BYTES = 1500 << 20
"""Of all of a node's hivemind processes together; one message may promise gigabytes."""
CALLS = (
    f"{RUN}-stage-0::PayloadPeer.rpc_fetch",
    f"{RUN}-stage-0::PayloadPeer.rpc_push",
    f"{RUN}-stage-0::PayloadPeer.rpc_state",
    *(f"{RUN}-stage-0::SparseAverager.{name}" for name in ("rpc_join_group", "rpc_aggregate_part")),
    f"{RUN}-stage-0::SparseAverager.rpc_download_state",
    *(f"DHTProtocol.{name}" for name in ("rpc_ping", "rpc_store", "rpc_find")),
)


async def test_the_next_round_works_after_random_bytes_of_a_member(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        alice = await start_node(tmp_path, "alice", (0,))
        stack.push_async_callback(alice.transport.close)
        bob = await start_node(tmp_path, "bob", (0,), alice.transport.addresses)
        stack.push_async_callback(bob.transport.close)
        noisy = open_identity(tmp_path / "noisy.key")
        for node in (alice, bob):
            await node.transport.admit([alice.identity.peer, bob.identity.peer, noisy.peer])
        await _gathered(alice, bob, round_number=1)
        for node in (alice, bob):
            arguments = (node.transport.addresses[0], str(noisy.path), *CALLS, "no.such.call")
            noise = await asyncio.to_thread(commands.run, "tests.support.hive_noise", *arguments)
            assert list(map(int, noise.stdout.split())) == [2 * TIMES] * len(CALLS) + [0]
        await _gathered(alice, bob, round_number=2)
        hosts = [host for template in psutil.Process().children() for host in template.children()]
        for host in hosts:
            tree = [host, *host.children(recursive=True)]
            assert sum(each.memory_info().rss for each in tree) < MOST_BYTES


async def _gathered(alice: Node, bob: Node, round_number: int) -> None:
    payload = os.urandom(100_000)
    group = canonical([node.descriptor(payload, 0, round_number) for node in (alice, bob)])
    held = await asyncio.gather(
        *(node.exchange(payload, node.descriptor(payload, 0, round_number), group) for node in (alice, bob))
    )
    assert held == [group, group]
