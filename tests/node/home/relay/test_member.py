"""A relay as a member of a run, and the coordinator's own: nodes learn of both, and bans reach both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.public_ports import RelayOptions as OwnRelayOptions
from coordinator.api.succession import Partner
from node.home.relay.agent import RelayAgent
from node.home.relay.member import RelayMemberOptions, run_relay
from node.net import moved_coordinator
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.enrollment import enroll
from node.security.credentials import exist, folder_of, load
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.relay.exposed import RelayedService
from protocol.status import CauseCode
from protocol.trust.reachability import Addresses
from protocol.types import Capacity, RelayAddress, Role
from protocol.wire.operator_calls import BanPeer
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import COORDINATOR, Running, running
from tests.support.ports import free_port

CAPACITY = Capacity("cpu", 2**30, 1)


@asynccontextmanager
async def relay_of(
    run: Running, identity: Identity, role: str = "relay"
) -> AsyncIterator[asyncio.Task[None]]:
    invite = await run.invite(role=role)
    options = RelayMemberOptions(invite, "", "127.0.0.1", 0, join_seconds=20)
    task = asyncio.create_task(run_relay(options, identity))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, HetnodeError):
            await task


@asynccontextmanager
async def member(run: Running, identity: Identity) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(await enroll(await run.invite(), identity, 10), identity)
    try:
        yield client
    finally:
        await client.close()


def known_by(identity: Identity, run: str) -> tuple[str, ...]:
    """Where an enrolled peer looks for its coordinator."""
    folder = folder_of(identity.path, run)
    return (load(folder).api, *load(folder).others) if exist(folder) else ()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  a file tells
            await asyncio.sleep(0.05)


async def relays_of(client: CoordinatorClient, count: int) -> tuple[RelayAddress, ...]:
    """The relays of the run, once the member knows of exactly `count`."""
    async for update in client.watch():
        if len(update.relays) == count:
            return update.relays
    raise AssertionError("the run is over")


async def test_nodes_learn_of_the_relays_of_a_run(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "run", relay=OwnRelayOptions()) as run:
        node, relay = open_identity(tmp_path / "node.key"), open_identity(tmp_path / "relay.key")
        async with member(run, node) as client:
            joined = await client.join(Role.REPLICA, CAPACITY, Addresses(dht="127.0.0.1:9"), "", 10)
            own = joined.relays[0]
            assert [each.peer for each in joined.relays] == [COORDINATOR.peer]
            async with relay_of(run, relay):
                found = await relays_of(client, 2)
                assert [each.peer for each in found] == [COORDINATOR.peer, relay.peer]
                servers = {service: lambda: ("127.0.0.1", 9) for service in RelayedService}
                for each in found:
                    agent = RelayAgent(each, node.peer, lambda: client.credentials.tls, servers)
                    keeping = asyncio.create_task(agent.keep())
                    assert await agent.connected()
                    keeping.cancel()
            assert await relays_of(client, 1) == (own,)
            status = await run.status()
            assert [peer.role for peer in status.peers if peer.lifecycle != "gone"] == ["replica"]
            assert status.cause.code is CauseCode.PEERS_LACKING


async def test_a_relay_goes_on_where_a_standby_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_coordinator, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(moved_coordinator, "LOOK_TOLD_SECONDS", 0.05)
    folder, other = tmp_path / "run", f"127.0.0.1:{free_port()}"
    folder.mkdir()
    (folder / "partner").write_text(other)
    spec = spec_of(timing__heartbeat=0.5)
    relay = open_identity(tmp_path / "relay.key")
    async with AsyncExitStack() as ends:
        relays = await ends.enter_async_context(AsyncExitStack())
        async with running(spec, folder) as run:
            await relays.enter_async_context(relay_of(run, relay))
            await until(lambda: other in known_by(relay, run.run))
        after = await ends.enter_async_context(
            running(spec, folder, other, partner=Partner(folder, takes_over=True))
        )
        ends.push_async_callback(relays.aclose)
        await until(lambda: known_by(relay, run.run)[:1] == (other,))
        assert [each.lifecycle for each in (await after.status()).peers] == ["ready"]


async def test_a_relay_that_is_stopped_before_it_learns_of_its_admission_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, admitted = CoordinatorClient.join, asyncio.Event()

    async def join(self: CoordinatorClient, *args: Any) -> Admission:
        await original(self, *args)
        admitted.set()
        return await asyncio.Future()  # the answer is on its way

    monkeypatch.setattr(CoordinatorClient, "join", join)
    async with running(spec_of(), tmp_path / "run") as run:
        relay = open_identity(tmp_path / "relay.key")
        async with relay_of(run, relay):
            await admitted.wait()
            assert [peer.lifecycle for peer in (await run.status()).peers] == ["ready"]
        assert [peer.lifecycle for peer in (await run.status()).peers] == ["gone"]


async def test_an_excluded_peer_loses_its_relay(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "run", relay=OwnRelayOptions()) as run:
        node, relay = open_identity(tmp_path / "node.key"), open_identity(tmp_path / "relay.key")
        async with member(run, node) as client, relay_of(run, relay):
            await client.join(Role.REPLICA, CAPACITY, Addresses(dht="127.0.0.1:9"), "", 10)
            servers = {service: lambda: ("127.0.0.1", 9) for service in RelayedService}
            agents = [
                RelayAgent(each, node.peer, lambda: client.credentials.tls, servers)
                for each in await relays_of(client, 2)
            ]
            keeping = [asyncio.create_task(agent.keep()) for agent in agents]
            ports = [await agent.connected() for agent in agents]
            await run.ask(BanPeer(node.peer, "test"))
            for port in ports:
                with suppress(OSError):
                    while True:  # until the relay has closed the port of that peer
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        await asyncio.sleep(0.02)
            for task in keeping:
                task.cancel()


@pytest.mark.parametrize("role", ["", "replica"])
async def test_only_an_invite_for_relays_lets_a_relay_in(tmp_path: Path, role: str) -> None:
    async with (
        running(spec_of(), tmp_path / "run") as run,
        relay_of(run, open_identity(tmp_path / "relay.key"), role) as relay,
    ):
        with pytest.raises(HetnodeError) as refused:
            await relay
        assert refused.value.code is ErrorCode.BAD_REQUEST


async def test_a_relay_ends_with_its_run(tmp_path: Path) -> None:
    peers = keyed(0), keyed(1)
    async with (
        running(spec_of(rounds=1), tmp_path / "run") as run,
        relay_of(run, open_identity(tmp_path / "relay.key")) as relay,
    ):
        for peer in peers:
            await run.join(peer)
        async for update in run.stub(peers[0]).Watch(pb.WatchRequest(peer=peers[0].peer)):
            if update.relays:  # it has joined
                break
        for stage in range(2):
            await run.settle(stage, 1, *peers)
        await relay
