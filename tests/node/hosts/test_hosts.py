"""A leader and a follower, each with a worker process of its own, which meet through a store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace

import psutil
import pytest

from node.hosts.follower import follow
from node.hosts.greeting import FAREWELL, GREETING, WELCOME, Greeting, LeaderNote, own_version, refusal
from node.hosts.launch import Launch
from node.hosts.leader import Leader
from node.ipc.channel import Child, Header, encode_message, read_message
from node.ipc.rank_channels import RankChannels
from protocol.errors import ErrorCode, HetnodeError
from tests.support.commands import template
from tests.support.ports import free_port
from tests.support.ranks import FullReplica

pytestmark = pytest.mark.usefixtures("one_thread")
CHOICES = {"data": "text:corpus"}
MINE = Greeting("token", own_version(), 1, 2, "host", "cpu", CHOICES)


def launches() -> tuple[Launch, Launch]:
    leader = Launch(0, 2, 0, 1, "127.0.0.1", free_port(), serves_store=True)
    return leader, replace(leader, rank=1)


@asynccontextmanager
async def following(launch: Launch) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(follow(launch, "cpu", CHOICES, 1))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, HetnodeError):
            await task


async def test_a_follower_works_again_after_a_rest_and_ends_with_its_leader() -> None:
    template()
    first, second = launches()
    async with following(second) as follower:
        async with Leader(first, "cpu", CHOICES, None) as leader:
            for round_number in (1, 2):
                async with AsyncExitStack() as processes:
                    replica = FullReplica(await leader.start(1, processes))
                    assert replica.worker.ranks == 2
                    if round_number == 2:
                        await replica.build()
                        await replica.train(1)
        await follower


async def test_the_end_of_a_worker_is_told_on_each_side() -> None:
    template()
    first, second = launches()
    followers: list[asyncio.Task[None]] = []

    async def train() -> None:
        async with AsyncExitStack() as stack:
            # The follower stays until the leader has ended.
            leader = await stack.enter_async_context(Leader(first, "cpu", CHOICES, None))
            others = {each.pid for each in workers()}
            async with AsyncExitStack() as processes:
                followers.append(asyncio.create_task(follow(second, "cpu", CHOICES, 1)))
                worker = await leader.start(1, processes)
                assert isinstance(worker.channel, RankChannels)
                own = worker.channel.ranks[0]
                assert isinstance(own, Child)
                (killed,) = [each for each in workers() if each.pid not in {*others, own.pid}]
                replica = FullReplica(worker)
                await replica.build()
                training = asyncio.create_task(replica.train(1))
                await asyncio.sleep(0)  # the step has begun
                killed.kill()
                await training

    with pytest.raises(HetnodeError, match="The worker of rank 1") as caught:
        await train()
    assert caught.value.code is ErrorCode.WORKER_DIED
    with pytest.raises(HetnodeError, match="The leader of this peer has ended"):
        await followers[0]


async def test_a_worker_that_dies_on_another_host_is_started_again() -> None:
    template()
    first, second = launches()
    async with Leader(first, "cpu", CHOICES, None) as leader:
        others = {each.pid for each in workers()}
        follower = asyncio.create_task(follow(second, "cpu", CHOICES, 1))
        for is_killed in (True, False):
            async with AsyncExitStack() as processes:
                worker = await leader.start(1, processes)
                assert isinstance(worker.channel, RankChannels)
                own = worker.channel.ranks[0]
                assert isinstance(own, Child)
                replica = FullReplica(worker)
                await replica.build()
                training = asyncio.create_task(replica.train(1))
                await asyncio.sleep(0)  # the step has begun
                if is_killed:
                    (killed,) = [each for each in workers() if each.pid not in {*others, own.pid}]
                    killed.kill()
                    with pytest.raises(HetnodeError, match="The worker of rank 1"):
                        await training
                else:
                    await training
    await follower


def workers() -> list[psutil.Process]:
    """The store, and both workers."""
    return [
        each for each in psutil.Process().children(recursive=True) if each.name().endswith("worker.process")
    ]


async def test_a_follower_with_other_options_ends_both_with_one_reason() -> None:
    template()
    first, second = launches()
    async with following(second) as follower:
        with pytest.raises(HetnodeError, match="another data than the leader") as caught:
            async with Leader(first, "cpu", {"data": "text:other"}, None) as leader:
                await leader.gather()
        assert caught.value.code is ErrorCode.BAD_OPTION
        with pytest.raises(HetnodeError, match="another data than the leader"):
            await follower


async def test_a_leader_that_is_not_there() -> None:
    template()
    with pytest.raises(HetnodeError) as caught:
        await follow(launches()[1], "cpu", CHOICES, 1, patience=0.5)
    assert caught.value.code is ErrorCode.RANK_FAILED


async def test_a_follower_that_does_not_come_is_named() -> None:
    template()
    async with Leader(launches()[0], "cpu", CHOICES, None, patience=0.01) as leader:
        with pytest.raises(HetnodeError, match=r"1 of 2 ranks .* rank 1") as caught:
            await leader.gather()
    assert caught.value.code is ErrorCode.RANK_FAILED


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"version": "0"}, ErrorCode.VERSION_MISMATCH),
        ({"size": 3}, ErrorCode.BAD_OPTION),
        ({"rank": 2}, ErrorCode.BAD_OPTION),
        ({"rank": 0}, ErrorCode.BAD_OPTION),
        ({"choices": {}}, ErrorCode.BAD_OPTION),
    ],
)
def test_followers_that_do_not_fit_are_refused(changed: dict[str, object], code: ErrorCode) -> None:
    found = refusal(replace(MINE, **changed), 2, CHOICES)  # type: ignore[arg-type]
    assert found is not None
    assert found.code is code


def test_a_follower_that_fits() -> None:
    assert refusal(GREETING.read(GREETING.encode(MINE)), 2, CHOICES) is None


@pytest.mark.parametrize("change", [{"rank": "1"}, {"more": 1}, {"token": None}])
def test_other_greetings_are_not_read(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Greeting"):
        GREETING.read(json.dumps(asdict(MINE) | change))


async def test_strangers_and_long_messages_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    template()
    ports: list[int] = []

    def note(port: int, token: str) -> LeaderNote:
        ports.append(port)
        return LeaderNote(port, token)

    monkeypatch.setattr("node.hosts.leader.LeaderNote", note)
    greeting = encode_message(Header(0), GREETING.encode(MINE))
    async with Leader(launches()[0], "cpu", CHOICES, None):
        for message in (b"".join(bytes(part) for part in greeting), b"\xff" * 8, b"\0" * 8):
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
            writer.write(message)
            assert await reader.read() == b""
            writer.close()


async def test_messages_are_bounded() -> None:
    reader = asyncio.StreamReader()
    for message in (encode_message(WELCOME), encode_message(FAREWELL, b"x" * 100)):
        reader.feed_data(b"".join(bytes(part) for part in message))
    assert (await read_message(reader, 99)).header == WELCOME
    with pytest.raises(ConnectionError):
        await read_message(reader, 99)
