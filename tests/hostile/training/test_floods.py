"""Floods of calls, connections and DHT calls while a run trains: its rounds go on meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.measure import Watch
from tests.hostile.peer import Peer
from tests.hostile.target import Target
from tests.hostile.training.swarm import attacked
from tests.hostile.wire import COORDINATOR, method
from tests.support.hostile import certificate_at, half_open, handshakes
from tests.support.processes import ProcessSwarm

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(900)]

HANDSHAKES, BATCH, PARALLEL = 20_000, 2_500, 100
SOURCES = [f"127.0.1.{n}" for n in range(1, 51)]
ROUNDS_IN_FLOOD = 2
FLOOD_SECONDS = 20.0


def committed(watch: Watch) -> set[int]:
    """The rounds of which a stage has been committed since the watch began."""
    return {each["round"] for each in watch.decisions if each["committed"]}


async def repeat_for_rounds(watch: Watch, flood: Callable[[], Awaitable[Any]]) -> int:
    """Make a flood again and again until rounds were committed that began after it. Returns their number."""
    before = len(committed(watch))
    while (during := len(committed(watch)) - before) <= ROUNDS_IN_FLOOD:
        await flood()
    return during


async def test_half_open_calls_of_a_member_and_of_strangers(swarm: ProcessSwarm, attacker: Peer) -> None:
    heartbeat, enroll = method("Coordinator", "Heartbeat")[0], method("Enrollment", "Enroll")[0]
    codes = Counter[str]()

    async def flood() -> None:
        async with AsyncExitStack() as stack:
            calls = []
            for _ in range(5):
                channel = attacker.open(attacker.api, COORDINATOR)
                calls += half_open(await stack.enter_async_context(channel), heartbeat, 4096)
            for _ in range(70):
                channel = attacker.open_as_stranger(attacker.invite.enrollment, COORDINATOR)
                calls += half_open(await stack.enter_async_context(channel), enroll, 4)
            codes.update(code.name for code in await asyncio.gather(*(call.code() for call in calls)))

    with attacked(swarm) as watch:
        async with Target(swarm).honest() as member:
            rounds = await repeat_for_rounds(watch, flood)
        print(f"\n{dict(codes)}; {rounds} rounds committed meanwhile; {member.latencies}")
        assert not member.failures


async def test_a_storm_of_handshakes_while_the_certificate_is_renewed(swarm: ProcessSwarm) -> None:
    """Of strangers at fifty sources."""
    target = Target(swarm)
    ports = (target.enrollment, target.address)
    with attacked(swarm) as watch:
        shown, began = await certificate_at(target.address), time.monotonic()
        count, parallel = BATCH // len(ports), PARALLEL // len(ports)
        ended, is_renewed = Counter[str](), False
        async with target.honest() as member:
            before = len(committed(watch))
            while ended.total() < HANDSHAKES or not is_renewed:
                storms = (handshakes(port, count, parallel, SOURCES) for port in ports)
                ended = sum(await asyncio.gather(*storms), ended)
                is_renewed = await certificate_at(target.address) != shown
            rounds = len(committed(watch)) - before
        rate = ended.total() / (time.monotonic() - began)
        print(f"\n{dict(ended)}, {rate:.0f} per s; {rounds} rounds committed meanwhile")
        print(member.latencies)
        assert not member.failures
        assert ended["done"] > 0.95 * ended.total()
        assert rounds >= ROUNDS_IN_FLOOD


@pytest.mark.parametrize(
    ("nbytes", "at_once"),
    [(20, 100), (20, 1000), (15_000, 1000), (450_000, 100), (450_000, 1000)],
    ids=lambda value: f"{value:,}",
)
async def test_a_member_floods_the_dht(
    swarm: ProcessSwarm, attacker: Peer, tmp_path: Path, nbytes: int, at_once: int
) -> None:
    """That of the coordinator and that of a node. Calls of more than 16 KiB are refused unread."""
    given = {
        "run": attacker.run,
        "dht_peers": list(attacker.dht_peers),
        "targets": [attacker.coordinator, swarm.peer("one")],
        "seconds": FLOOD_SECONDS,
        "at_once": at_once,
        "nbytes": nbytes,
    }
    for name, content in (("identity", attacker.identity.file), ("certificate", attacker.certificate)):
        (tmp_path / name).write_bytes(content)
        given[name] = str(tmp_path / name)
    (tmp_path / "given").write_text(json.dumps(given))
    with attacked(swarm) as watch:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.hostile.dht_flood", str(tmp_path / "given")),
            stdout=asyncio.subprocess.PIPE,
        )
        ended, _ = await process.communicate()
        print(f"\n{ended.decode().strip()}; {len(committed(watch))} rounds committed meanwhile")
        assert process.returncode == 0
        assert len(committed(watch)) >= ROUNDS_IN_FLOOD
