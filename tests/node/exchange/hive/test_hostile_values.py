"""What a member of the run may write into the DHT, and answer to it: real processes, on loopback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from node.security.identity import Identity, open_identity
from tests.support import commands
from tests.support.hive_nodes import Node, certified, record_of, start_node
from tests.support.waiting import is_alive

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST_GROWTH = 32 << 20
"""Of the DHT process in an attack; the values of the largest one have 90 MiB."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Node, Node]]:
    """A bootstrap peer, which is attacked, and an honest peer."""
    folder = tmp_path_factory.mktemp("pair")
    async with AsyncExitStack() as stack:
        bootstrap = await start_node(folder, "bootstrap", ())
        stack.push_async_callback(bootstrap.transport.close)
        honest = await start_node(folder, "honest", (), bootstrap.transport.addresses)
        stack.push_async_callback(honest.transport.close)
        yield bootstrap, honest


def arguments(attack: str, target: Node, attacker: Identity) -> list[str]:
    shown = certified(attacker)
    files = (attacker.path, shown["certificate"], shown["authority"])
    return [attack, target.transport.addresses[0], *map(str, files)]


async def attacked(attack: str, target: Node, attacker: Identity) -> list[str]:
    run = await asyncio.to_thread(
        commands.run, "tests.support.hive_attacker", *arguments(attack, target, attacker)
    )
    return run.stdout.splitlines()


async def is_useful(bootstrap: Node, honest: Node, ttl: float) -> bool:
    """Whether the same processes still keep records of peers. A later call needs a longer `ttl`."""
    await honest.transport.publish(record_of(honest.identity), ttl)
    return honest.identity.peer in await bootstrap.transport.lookup()


async def test_values_inside_each_other_are_refused_unread(pair: tuple[Node, Node], tmp_path: Path) -> None:
    bootstrap, honest = pair
    processes = bootstrap.processes
    answers = await attacked("nested", bootstrap, open_identity(tmp_path / "attacker.key"))
    assert len(answers) == 6
    assert all(answer == "[False]" or answer.startswith("refused") for answer in answers), answers
    assert all(map(is_alive, processes))
    assert await is_useful(bootstrap, honest, ttl=300)


async def test_answers_with_values_inside_each_other_do_no_harm(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    bootstrap, honest = pair
    processes = [*bootstrap.processes, *honest.processes]
    liar = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.hive_attacker",
        *arguments("lie", bootstrap, open_identity(tmp_path / "liar.key")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert liar.stdin is not None
    assert liar.stdout is not None
    try:
        assert await liar.stdout.readline() == b"joined\n"
        await honest.transport.publish(record_of(honest.identity), ttl=600)
        assert honest.identity.peer in await bootstrap.transport.lookup()
        assert await liar.stdout.readline() == b"lied\n"
        assert all(map(is_alive, processes))
    finally:
        liar.kill()
        await liar.wait()


async def test_only_known_entries_of_the_caller_are_kept(pair: tuple[Node, Node], tmp_path: Path) -> None:
    bootstrap, _ = pair
    answers = await attacked("unknown", bootstrap, open_identity(tmp_path / "attacker.key"))
    assert answers[-1] == "[True]"
    assert answers[:-1] == ["[False]"] * (len(answers) - 1)


async def test_large_values_are_not_kept(pair: tuple[Node, Node], tmp_path: Path) -> None:
    bootstrap, honest = pair
    dht = psutil.Process(bootstrap.transport.pid).children()[0]
    before = dht.memory_info().rss
    answers = await attacked("large", bootstrap, open_identity(tmp_path / "attacker.key"))
    assert len(answers) == 30
    assert "[True]" not in answers
    assert dht.memory_info().rss - before < MOST_GROWTH
    assert await is_useful(bootstrap, honest, ttl=900)


async def test_a_stranger_is_refused_and_gets_no_service_of_libp2p_but_of_the_first_peer(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    bootstrap, honest = pair
    stranger = str(open_identity(tmp_path / "stranger.key").path)

    async def attacks(name: str, target: Node) -> list[str]:
        address = target.transport.addresses[0]
        shown = await asyncio.to_thread(commands.run, "tests.support.hive_attacker", name, address, stranger)
        return shown.stdout.splitlines()

    # The others find each other by the DHT of libp2p, of which one peer is enough.
    for target, offered in ((bootstrap, ["False", "False", "True"]), (honest, ["False"] * 3)):
        assert [line.split()[1] for line in await attacks("services", target)] == offered
    assert all(line.startswith("refused") for line in await attacks("unknown", bootstrap))
