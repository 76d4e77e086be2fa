"""The stand-ins for gRPC and hivemind behave as the real ones do, towards production code that uses them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from node import hooks
from node.net.coordinator_client import CoordinatorClient
from node.net.link import Link, LinkEndpoint, LinkLimits
from node.net.link_dialer import Links
from node.net.link_server import LinkServer
from node.security.credentials import RunCredentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.envelope import sign_descriptor
from protocol.trust.tls import peer_uri
from protocol.types import Capacity, ExchangeGroup, Frame, FrameId, FrameKind, ManifestEntry, Role
from tests.builders import Keyed, keyed, spec_of
from tests.support.certificates import authority, credentials
from tests.support.fault_hooks import FaultHooks
from tests.support.fault_script import Action, Moment, Script
from tests.support.faults import FaultPlan
from tests.virtual.coordinator import ADDRESS, OWNER, VirtualCoordinator
from tests.virtual.hive import Dht, VirtualTransport
from tests.virtual.loop import BEGINNING, Life, VirtualLoop, run, start
from tests.virtual.network import SILENCE_SECONDS, Network
from tests.virtual.rpc import VirtualGrpc

A, B, C = keyed(1), keyed(2), keyed(3)
NAMES = {"a": A, "b": B, "c": C}
LIMITS = LinkLimits(1 << 20, 8)


class Machines:
    """The machines a, b and c on one network, with what scripted nodes need."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spec = folder, spec_of(stages=1)
        self.network = Network(Random(0))
        self.rpc = VirtualGrpc(self.network)
        self.dht = Dht()
        self.lives = {name: Life(name) for name in NAMES}
        for name, who in NAMES.items():
            self.rpc.knows(name, peer_uri(who.peer))
        self.coordinator = VirtualCoordinator(
            self.spec, folder / "coordinator", self.rpc, lambda event, state: None
        )

    def on(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return start(self.lives[name], work)

    def kill(self, name: str) -> None:
        loop().end(self.lives[name])
        self.rpc.has_died(self.lives[name])

    def plan(self, name: str, plan: FaultPlan) -> None:
        process_control = KillingHands(self, name)
        script = Script(plan.faults_of(name), plan.report_of(name), process_control, loop().time)
        self.lives[name].context.run(hooks.install, FaultHooks(script))

    def client(self, name: str) -> CoordinatorClient:
        """To be made on the machine itself."""
        run_credentials = RunCredentials(
            self.folder, self.spec.run_id, ADDRESS, OWNER.peer, None, credentials(NAMES[name].peer)
        )
        return CoordinatorClient(run_credentials, NAMES[name])  # type: ignore[arg-type]

    async def hive(self, name: str) -> VirtualTransport:
        """To be made on the machine itself."""
        hive = VirtualTransport(self.rpc, self.dht, NAMES[name], self.spec.run_id, client_mode=False)  # type: ignore[arg-type]
        await hive.host_stages({0: 1000}, self.folder / name, self.folder / name / "checkpoint", 30)
        await hive.admit([who.peer for who in NAMES.values()])
        return hive


class KillingHands:
    def __init__(self, machines: Machines, name: str) -> None:
        self._machines, self._name = machines, name

    def kill(self) -> None:
        self._machines.kill(self._name)

    def stop(self, seconds: float) -> None:
        raise NotImplementedError

    pause = stop


def loop() -> VirtualLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


def now() -> float:
    return loop().time() - BEGINNING


Play = Callable[[Callable[[Machines], Awaitable[None]]], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run_scenario(scenario: Callable[[Machines], Awaitable[None]]) -> None:
        async def main() -> None:
            machines = Machines(tmp_path)
            with machines.rpc.installed():
                await scenario(machines)

        run(main(), horizon=10_000)

    authority()  # made once, on real time
    return run_scenario


async def joined(client: CoordinatorClient) -> RunSpec:
    return (await client.join(Role.REPLICA, Capacity("cpu", 2**30, 1), "", "", 15.0)).spec


async def code_of(call: Awaitable[object]) -> ErrorCode:
    with pytest.raises(HetnodeError) as error:
        await call
    return error.value.code


def test_a_client_joins_watches_and_beats_through_the_production_service(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()

        async def node(name: str) -> int:
            client = machines.client(name)
            assert await joined(client) == machines.spec
            async for news in client.watch():
                if news.plan is not None:
                    await client.heartbeat(1, 0)
                    return len(news.plan.replicas)
            raise AssertionError

        nodes = [machines.on(name, node(name)) for name in ("a", "b")]
        assert await asyncio.gather(*nodes) == [2, 2]

    play(scenario)


def test_nobody_can_speak_for_another(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()

        async def node() -> None:
            assert await code_of(joined(machines.client("b"))) is ErrorCode.CERTIFICATE_REFUSED

        await machines.on("a", node())

    play(scenario)


def test_who_is_cut_off_finds_the_coordinator_unreachable_until_the_network_heals(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()

        async def node() -> None:
            client = machines.client("a")
            await joined(client)
            machines.network.isolate("a")
            began = now()
            assert await code_of(client.heartbeat(0, 0)) is ErrorCode.COORDINATOR_UNREACHABLE
            assert now() - began == pytest.approx(15)
            machines.network.heal()
            await client.heartbeat(0, 0)

        await machines.on("a", node())

    play(scenario)


def test_a_killed_coordinator_resets_its_calls_and_its_successor_knows_everybody(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()

        async def node() -> None:
            client = machines.client("a")
            await joined(client)
            asyncio.get_running_loop().call_later(3, machines.coordinator.kill)
            with pytest.raises(HetnodeError) as error:
                async for _ in client.watch():
                    pass
            assert error.value.code is ErrorCode.COORDINATOR_UNREACHABLE
            assert now() == pytest.approx(3, abs=1)
            beating = asyncio.ensure_future(client.heartbeat(0, 0))
            await asyncio.sleep(5)
            assert not beating.done()
            await machines.coordinator.start()
            await beating

        await machines.on("a", node())
        assert A.peer in machines.coordinator.state.peers

    play(scenario)


def test_calls_that_arrive_twice_are_done_twice_and_answered_once(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()
        machines.rpc.duplicated = {"Join"}

        async def node() -> None:
            assert await joined(machines.client("a")) == machines.spec

        await machines.on("a", node())
        assert len(machines.coordinator.state.peers) == 1

    play(scenario)


def place(machines: Machines, who: Keyed, position: int) -> LinkEndpoint:
    return LinkEndpoint(machines.spec.run_id, machines.spec.hash, who.peer, 0, position)


async def connected(machines: Machines) -> tuple[Link, Link]:
    """The two ends of a link that a has dialled to b, by the production greeting."""
    above, below = place(machines, A, 0), place(machines, B, 1)
    listening = loop().create_future()

    async def accept() -> Link:
        server = LinkServer(lambda: credentials(B.peer))
        listening.set_result(await server.start("b", 0))
        return await Links(server, lambda: credentials(B.peer)).accept(below, above, LIMITS, 10)

    async def dial() -> Link:
        endpoint = f"b:{await listening}"
        return await Links(None, lambda: credentials(A.peer)).dial(endpoint, above, below, LIMITS, 10)

    accepted, dialled = machines.on("b", accept()), machines.on("a", dial())
    return await dialled, await accepted


def frame(step: int) -> Frame:
    return Frame(FrameId(1, 1, step, 0, FrameKind.STEP), (), b"")


def test_links_carry_frames_and_end_when_the_other_end_is_killed(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        above, below = await connected(machines)
        await machines.on("a", above.send(frame(1), 5))
        assert await machines.on("b", below.take(frame(1).id, 5)) == frame(1)
        await machines.on("b", below.send(frame(2), 5))
        assert await machines.on("a", above.take(frame(2).id, 5)) == frame(2)
        machines.kill("a")
        assert await code_of(machines.on("b", below.take(frame(3).id, 60))) is ErrorCode.NEIGHBOUR_LOST
        assert now() < 5

    play(scenario)


@pytest.mark.parametrize("seconds", [SILENCE_SECONDS - 10, SILENCE_SECONDS + 10])
def test_a_suspended_machine_loses_its_connections_only_after_the_keepalive(
    play: Play, seconds: float
) -> None:
    async def scenario(machines: Machines) -> None:
        above, below = await connected(machines)
        life = machines.lives["b"]
        loop().suspend(life)
        machines.network.is_silent(life)
        taking = machines.on("b", below.take(frame(1).id, 200))
        await asyncio.sleep(seconds)
        loop().resume(life)
        if seconds > SILENCE_SECONDS:
            assert await code_of(machines.on("a", above.send(frame(1), 5))) is ErrorCode.NEIGHBOUR_LOST
            assert await code_of(taking) is ErrorCode.NEIGHBOUR_LOST
        else:
            await machines.on("a", above.send(frame(1), 5))
            assert await taking == frame(1)

    play(scenario)


def test_a_machine_behind_a_router_can_call_and_not_be_called(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        machines.network.close("a", "b")
        assert await code_of(connected(machines)) is ErrorCode.NEIGHBOUR_UNREACHABLE
        machines.network.heal()
        machines.network.close("b", "a")
        await connected(machines)

    play(scenario)


def payload_of(who: Keyed) -> bytes:
    return f"{who.number} 0 1".encode()


def group_of(machines: Machines, *members: Keyed) -> ExchangeGroup:
    described = sorted((described_by(machines, who) for who in members), key=lambda each: each.owner)
    return ExchangeGroup("g", tuple(described))


def described_by(machines: Machines, who: Keyed) -> Any:
    unsigned = who.payload(machines.spec, 0, 1)
    return sign_descriptor(replace(unsigned, nbytes=len(payload_of(who)), signature=b""), who.sign)


async def exchanging(
    machines: Machines, name: str, group: ExchangeGroup, seconds: float = 10
) -> tuple[set[str], int]:
    """What the machine holds afterwards, and how much it has refused."""
    who = NAMES[name]
    hive = await machines.hive(name)
    gathered = await hive.exchange(
        payload_of(who), described_by(machines, who), group, expected=3, deadline=seconds
    )
    return {each.owner for each in gathered.held}, len(gathered.rejected)


def test_an_exchange_gives_everybody_everything(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        group = group_of(machines, A, B, C)
        found = await asyncio.gather(
            *(machines.on(name, exchanging(machines, name, group)) for name in NAMES)
        )
        assert found == [({A.peer, B.peer, C.peer}, 0)] * 3

    play(scenario)


def test_a_peer_killed_while_it_sends_leaves_the_others_with_what_they_have(
    play: Play, tmp_path: Path
) -> None:
    plan = FaultPlan(tmp_path / "faults").fail_at("a", 0, 1, Moment.SENDING, Action.KILL)
    plan.folder.mkdir()

    async def scenario(machines: Machines) -> None:
        machines.plan("a", plan)
        group = group_of(machines, A, B, C)
        machines.on("a", exchanging(machines, "a", group))
        found = await asyncio.gather(*(machines.on(name, exchanging(machines, name, group)) for name in "bc"))
        assert found == [({B.peer, C.peer}, 0)] * 2

    play(scenario)
    plan.assert_all_fired()


def test_a_payload_damaged_on_its_way_is_got_from_somebody_else(play: Play, tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "faults").fail_at("a", 0, 1, Moment.SENDING, Action.CORRUPT)
    plan.folder.mkdir()

    async def scenario(machines: Machines) -> None:
        machines.plan("a", plan)
        group = group_of(machines, A, B, C)
        found = await asyncio.gather(
            *(machines.on(name, exchanging(machines, name, group)) for name in NAMES)
        )
        assert [held for held, _ in found] == [{A.peer, B.peer, C.peer}] * 3

    play(scenario)
    plan.assert_all_fired()


def test_payloads_outlive_their_node_and_are_fetched_by_hash(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.on("a", exchanging(machines, "a", group_of(machines, A), 1))
        machines.kill("a")
        machines.lives["a"] = Life("a")
        await machines.on("a", machines.hive("a"))

        async def fetch() -> bytes:
            entry = ManifestEntry(described_by(machines, A), (C.peer, A.peer))
            return await (await machines.hive("b")).fetch_payload(entry, 10)

        got = await machines.on("b", fetch())
        assert got == payload_of(A)
        assert hashlib.sha256(got).hexdigest() == described_by(machines, A).sha256

    play(scenario)


def test_without_the_coordinator_groups_are_found_by_looking(play: Play) -> None:
    async def scenario(machines: Machines) -> None:
        found = await asyncio.gather(*(machines.on(name, looking(machines, name)) for name in NAMES))
        assert found == [3, 3, 3]

    async def looking(machines: Machines, name: str) -> int:
        who, hive = NAMES[name], await machines.hive(name)
        gathered = await hive.exchange(
            payload_of(who), described_by(machines, who), None, expected=3, deadline=10
        )
        return len(gathered.held)

    play(scenario)
