"""The virtual gRPC behaves as the real one does towards production code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from node.net.coordinator_client import CoordinatorClient
from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.link_dialer import dial as dial_link
from node.net.link_server import LinkServer
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.reachability import Addresses
from protocol.types import Capacity, Frame, FrameId, FrameKind, Role
from tests.builders import Keyed
from tests.support.certificates import credentials
from tests.virtual.loop import elapsed, running_loop
from tests.virtual.machines import A, B, Machines, Simulate
from tests.virtual.network import SILENCE_SECONDS

LIMITS = LinkLimits(1 << 20, 8)


async def joined(client: CoordinatorClient) -> RunSpec:
    return (
        await client.join(Role.REPLICA, Capacity("cpu", 2**30, 1), Addresses(dht="here:1"), "", 15.0)
    ).spec


async def code_of(call: Awaitable[object]) -> ErrorCode:
    with pytest.raises(HetnodeError) as error:
        await call
    return error.value.code


def test_a_machine_cannot_call_as_another_peer(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()

        async def node() -> None:
            assert await code_of(joined(machines.client("b"))) is ErrorCode.CERTIFICATE_REFUSED

        await machines.on("a", node())

    simulate(scenario)


def test_an_isolated_machine_reaches_the_coordinator_after_the_network_heals(
    simulate: Simulate,
) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()

        async def node() -> None:
            client = machines.client("a")
            await joined(client)
            machines.network.isolate("a")
            began = elapsed()
            assert await code_of(client.heartbeat(0, 0)) is ErrorCode.COORDINATOR_UNREACHABLE
            assert elapsed() - began == pytest.approx(15)
            machines.network.heal()
            await client.heartbeat(0, 0)

        await machines.on("a", node())

    simulate(scenario)


def test_a_killed_coordinator_resets_its_calls_and_a_new_one_knows_all_peers(simulate: Simulate) -> None:
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
            assert elapsed() == pytest.approx(3, abs=1)
            heartbeat = asyncio.ensure_future(client.heartbeat(0, 0))
            await asyncio.sleep(5)
            assert not heartbeat.done()
            await machines.coordinator.start()
            await heartbeat

        await machines.on("a", node())
        assert A.peer in machines.coordinator.state.peers

    simulate(scenario)


def test_a_call_that_arrives_twice_runs_twice_and_has_one_reply(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.coordinator.start()
        machines.rpc.duplicated = {"Join"}

        async def node() -> None:
            assert await joined(machines.client("a")) == machines.spec

        await machines.on("a", node())
        assert len(machines.coordinator.state.peers) == 1

    simulate(scenario)


def end_at(machines: Machines, keyed: Keyed, position: int) -> LinkMember:
    return LinkMember(machines.run_id, machines.spec.hash, keyed.peer, 0, position)


async def connected(machines: Machines) -> tuple[LiveLink, LiveLink]:
    """The two ends of a link from a to b after the production handshake."""
    above, below = end_at(machines, A, 0), end_at(machines, B, 1)
    listening = running_loop().create_future()

    async def accept() -> LiveLink:
        own = credentials(B.peer)
        server = LinkServer(lambda: own)
        listening.set_result(await server.start("b", 0))
        return await server.accept(below, above, LIMITS, 10)

    async def dial() -> LiveLink:
        address = f"b:{await listening}"
        return await dial_link(address, above, below, LIMITS, 10, credentials(A.peer))

    accepted, dialled = machines.on("b", accept()), machines.on("a", dial())
    return await asyncio.gather(dialled, accepted)


def frame(step: int) -> Frame:
    return Frame(FrameId(1, 1, step, 0, FrameKind.STEP), (), b"")


def test_links_carry_frames_and_end_when_the_other_end_is_killed(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        above, below = await connected(machines)
        await machines.on("a", above.send(frame(1), 5))
        assert await machines.on("b", below.take(frame(1).id, 5)) == frame(1)
        await machines.on("b", below.send(frame(2), 5))
        assert await machines.on("a", above.take(frame(2).id, 5)) == frame(2)
        machines.kill("a")
        assert await code_of(machines.on("b", below.take(frame(3).id, 60))) is ErrorCode.NEIGHBOUR_LOST
        assert elapsed() < 5

    simulate(scenario)


@pytest.mark.parametrize("seconds", [SILENCE_SECONDS - 10, SILENCE_SECONDS + 10])
def test_a_suspended_machine_loses_its_connections_only_after_the_keepalive(
    simulate: Simulate, seconds: float
) -> None:
    async def scenario(machines: Machines) -> None:
        above, below = await connected(machines)
        process = machines.processes["b"]
        running_loop().suspend(process)
        machines.network.start_keepalive(process)
        taking = machines.on("b", below.take(frame(1).id, 200))
        await asyncio.sleep(seconds)
        running_loop().resume(process)
        if seconds > SILENCE_SECONDS:
            assert await code_of(machines.on("a", above.send(frame(1), 5))) is ErrorCode.NEIGHBOUR_LOST
            assert await code_of(taking) is ErrorCode.NEIGHBOUR_LOST
        else:
            await machines.on("a", above.send(frame(1), 5))
            assert await taking == frame(1)

    simulate(scenario)


def test_a_machine_behind_a_router_can_call_but_cannot_be_called(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        machines.network.block_calls("a", "b")
        assert await code_of(connected(machines)) is ErrorCode.NEIGHBOUR_UNREACHABLE
        machines.network.heal()
        machines.network.block_calls("b", "a")
        await connected(machines)

    simulate(scenario)
