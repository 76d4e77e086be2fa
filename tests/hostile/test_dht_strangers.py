"""Strangers at another source than the members, at the DHT ports of a run that trains: real processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.security.identity import open_identity
from protocol.types import Role
from tests.builders import spec_of
from tests.hostile.measure import unharmed
from tests.support import commands
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.hostile]

HONEST = {"one": Role.REPLICA, "two": Role.REPLICA}
STRANGER = "127.0.0.5"
CONNECTIONS, AT_ONCE = 10_000, 64
CALL = bytes(450_000)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    spec = spec_of(replicas=2, pipelines=0, rounds=100_000, timing__straggler=1e6, timing__lost_after=60.0)
    with ProcessSwarm(spec, tmp_path_factory.mktemp("strangers") / "swarm", HONEST) as started:
        started.start()
        started.wait_round(5, 240)  # the processes have their final size
        yield started


def port_of(swarm: ProcessSwarm, name: str) -> int:
    """The public port of a member's DHT."""
    connections = swarm.hivemind_of(name)["DHT"].net_connections("tcp")
    (port,) = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return int(port)


async def flood(port: int) -> Counter[int]:
    """Open connections that send a large call each; count them by the number of bytes that came back."""
    numbers, answered = iter(range(CONNECTIONS)), Counter[int]()

    async def open_some() -> None:
        for _ in numbers:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(STRANGER, 0))
                writer.write(CALL)
                answered[len(await reader.read(100))] += 1
                writer.transport.abort()
            except ConnectionError:
                answered[0] += 1

    await asyncio.gather(*(open_some() for _ in range(AT_ONCE)))
    return answered


async def test_a_flood_of_connections_reaches_no_p2pd_and_aborts_no_round(swarm: ProcessSwarm) -> None:
    with unharmed(swarm) as watch:
        for name in (COORDINATOR, "one"):
            assert await flood(port_of(swarm, name)) == {0: CONNECTIONS}
        await asyncio.to_thread(swarm.wait_round, swarm.round_number + 2, 120)
    print(watch.report())
    for name in (COORDINATOR, "one"):
        log = swarm.log(name)
        assert f"refused {STRANGER}: connections from there are not admitted" in log
        assert log.count(STRANGER) < 100


async def test_a_libp2p_stranger_learns_no_address_and_cannot_begin_its_flood(
    swarm: ProcessSwarm, tmp_path: Path
) -> None:
    stranger = str(open_identity(tmp_path / "stranger.key").path)
    address = f"/ip4/127.0.0.1/tcp/{port_of(swarm, 'one')}/p2p/{swarm.peer('one')}"
    wanted = swarm.peer("two")
    with unharmed(swarm) as watch:
        asked = await asyncio.to_thread(
            commands.run, "tests.support.hive_stranger", STRANGER, stranger, address, wanted
        )
        assert asked.stdout.splitlines() == ["refused", "unknown"], asked.stderr
        flooded = await asyncio.to_thread(
            commands.run,
            "tests.support.hive_attacker",
            "flood",
            address,
            stranger,
            environment={"ATTACK_FROM": STRANGER},
        )
        assert "failed to connect" in flooded.stderr
        await asyncio.to_thread(swarm.wait_round, swarm.round_number + 2, 120)
    print(watch.report())
