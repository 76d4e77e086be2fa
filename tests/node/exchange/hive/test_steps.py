"""Every exchange is a step of hivemind's averager; without the coordinator hivemind also finds the group."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from node.ipc.channel import Child, start_child
from tests.support.hive_nodes import canonical, start_node


async def test_an_exchange_is_a_step_of_hivemind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = tmp_path / "steps"

    async def start_recording_host(_: str, *, environment: dict[str, str], **options: Any) -> Child:
        environment = {**environment, "STEP_LOG": str(steps)}
        return await start_child("tests.support.hive_recording_host", environment=environment, **options)

    monkeypatch.setattr("node.exchange.hive.host_process.start_child", start_recording_host)
    async with AsyncExitStack() as stack:
        alice = await start_node(tmp_path, "alice", (0,))
        stack.push_async_callback(alice.transport.close)
        bob = await start_node(tmp_path, "bob", (0,), alice.transport.addresses)
        stack.push_async_callback(bob.transport.close)
        for node in (alice, bob):
            await node.transport.admit([alice.identity.peer, bob.identity.peer])
        for round_number, has_coordinator in ((1, True), (2, False)):
            own = {node: node.descriptor(b"payload", 0, round_number) for node in (alice, bob)}
            group = canonical(list(own.values()))
            matched = group if has_coordinator else None
            held = await asyncio.gather(
                *(node.exchange(b"payload", own[node], matched, expected=2) for node in own)
            )
            assert held == [group, group]
            searches = 0 if has_coordinator else 2
            assert Counter(steps.read_text().split()) == Counter(step=2 * round_number, search=searches)
