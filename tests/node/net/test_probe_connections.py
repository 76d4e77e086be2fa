"""Probes over real connections, to the coordinator and to other peers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.api import service
from node.net import probe as probing
from node.net.coordinator_channel import CoordinatorChannel
from node.net.link_handshake import stream_options
from node.net.link_server import LinkServer
from node.net.probe import Figures, probe_peer
from node.security.channels import open_channel
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.names import COORDINATOR_NAME, tls_name
from protocol.types import PeerId
from protocol.wire.operator_calls import BanPeer
from protocol.wire.probing import ProbeDoor
from tests.builders import keyed, spec_of
from tests.support.certificates import authority, credentials
from tests.support.coordinator_process import Running, running

A, B = keyed(0), keyed(1)


SHORT = 0.05


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(spec_of(), tmp_path) as coordinator:
        yield coordinator


def shown(run: Running, peer: str) -> Credentials:
    return credentials(peer, run.authority)


def is_measured(figures: Figures) -> bool:
    return all(0 < value < math.inf for value in (figures.round_trip, figures.uplink, figures.downlink))


async def refused(probing: Coroutine[Any, Any, object]) -> ErrorCode:
    with pytest.raises(HetnodeError) as error:
        await probing
    return error.value.code


async def probed(run: Running, peer: str, tls: Credentials | None = None) -> Figures:
    async with CoordinatorChannel(run.address, tls or shown(run, peer)) as channel, channel.probe() as found:
        return await found.figures(SHORT)


async def test_a_peer_measures_the_connection_to_the_coordinator_before_it_joins(run: Running) -> None:
    assert is_measured(await probed(run, A.peer))
    assert not (await run.status()).peers


async def test_the_operator_can_measure_the_connection_to_the_coordinator(run: Running) -> None:
    key, certificate = ((run.folder / name).read_bytes() for name in ("operator.key", "operator.pem"))
    assert is_measured(await probed(run, "", Credentials(run.authority.pem, certificate, key)))


async def test_a_probe_without_a_certificate_is_refused(run: Running) -> None:
    stranger = replace(credentials(A.peer, authority("another")), authority=run.authority.pem)
    assert await refused(probed(run, A.peer, stranger)) in (
        ErrorCode.WRONG_AUTHORITY,
        ErrorCode.COORDINATOR_UNREACHABLE,
    )


async def test_the_coordinator_refuses_a_probe_of_a_banned_peer(run: Running) -> None:
    await run.ask(BanPeer(A.peer))
    assert await refused(probed(run, A.peer)) is ErrorCode.BANNED


async def test_the_coordinator_answers_one_probe_of_a_peer_and_four_of_all(run: Running) -> None:
    peers = [keyed(number).peer for number in range(5)]
    async with asyncio.TaskGroup() as group:
        inside = [asyncio.Event() for _ in range(4)]
        done = asyncio.Event()

        async def hold(peer: str, entered: asyncio.Event) -> None:
            async with CoordinatorChannel(run.address, shown(run, peer)) as channel, channel.probe() as held:
                await held.round_trip(1)
                entered.set()
                await done.wait()

        for peer, entered in zip(peers, inside, strict=False):
            group.create_task(hold(peer, entered))
        for entered in inside:
            await entered.wait()
        assert await refused(probed(run, peers[0])) is ErrorCode.RATE_LIMITED
        assert await refused(probed(run, peers[4])) is ErrorCode.RATE_LIMITED
        done.set()


async def test_an_idle_probe_is_ended(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_PROBE_SECONDS", 0.05)

    async def idle() -> None:
        async with CoordinatorChannel(run.address, shown(run, A.peer)) as channel, channel.probe() as found:
            await found.round_trip(1)
            await found.welcome()  # there is no second one

    assert await refused(idle()) is ErrorCode.RATE_LIMITED


async def test_a_caller_stops_waiting_for_a_peer_that_never_answers(
    run: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "MOST_SECONDS", 0.3)

    async def wait() -> None:
        async with CoordinatorChannel(run.address, shown(run, A.peer)) as channel, channel.probe() as found:
            await found.welcome()  # there is no second one

    assert await refused(wait()) is ErrorCode.NEIGHBOUR_UNREACHABLE


async def test_bytes_that_are_no_message_are_refused(run: Running) -> None:
    channel = open_channel(run.address, shown(run, A.peer), COORDINATOR_NAME, ())
    call = channel.stream_stream("/hetnode.v1.Coordinator/Probe")()
    await call.read()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await channel.close()


async def test_a_coordinator_that_is_away_is_reported(run: Running) -> None:
    async def away() -> None:
        async with CoordinatorChannel("127.0.0.1:9", shown(run, A.peer)) as channel, channel.probe() as found:
            await found.round_trip()

    assert await refused(away()) is ErrorCode.COORDINATOR_UNREACHABLE


@asynccontextmanager
async def serving(probes: ProbeDoor | None = None) -> AsyncIterator[tuple[LinkServer, str]]:
    server = LinkServer(lambda: credentials(B.peer), probes=probes)
    yield server, f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.close()


@pytest.fixture
async def listening() -> AsyncIterator[tuple[LinkServer, str]]:
    async with serving() as served:
        yield served


async def way_to(address: str, tls: Credentials | None = None, peer: PeerId = B.peer) -> Figures:
    async with probe_peer(address, peer, tls or credentials(A.peer)) as found:
        return await found.figures(SHORT)


async def test_a_peer_measures_the_connection_to_another_peer(listening: tuple[LinkServer, str]) -> None:
    assert is_measured(await way_to(listening[1]))


@pytest.mark.parametrize("tls", [credentials(A.peer, authority("another")), credentials(A.peer, ended=True)])
async def test_peers_refuse_probes_without_a_certificate_of_the_run(
    listening: tuple[LinkServer, str], tls: Credentials
) -> None:
    believing = replace(tls, authority=credentials(B.peer).authority)
    assert await refused(way_to(listening[1], believing)) in (
        ErrorCode.CERTIFICATE_REFUSED,
        ErrorCode.NEIGHBOUR_UNREACHABLE,
    )


async def test_a_probe_of_another_peer_than_the_named_one_is_refused(
    listening: tuple[LinkServer, str],
) -> None:
    assert await refused(way_to(listening[1], peer=keyed(7).peer)) is ErrorCode.CERTIFICATE_REFUSED


async def test_a_peer_refuses_a_probe_of_a_banned_peer(listening: tuple[LinkServer, str]) -> None:
    server, address = listening
    server.refuse_probes_of(lambda: {A.peer})
    assert await refused(way_to(address)) is ErrorCode.BANNED


async def test_a_training_peer_answers_only_echoes(listening: tuple[LinkServer, str]) -> None:
    server, address = listening
    server.limit_probes_while(lambda: True)
    async with probe_peer(address, B.peer, credentials(A.peer)) as found:
        assert 0 < await found.round_trip() < math.inf
    assert await refused(way_to(address)) is ErrorCode.RATE_LIMITED


async def test_a_peer_answers_few_probes_at_the_same_time() -> None:
    async with serving(ProbeDoor(0, lambda: 0.0)) as (_, address):
        assert await refused(way_to(address)) is ErrorCode.RATE_LIMITED


@pytest.mark.parametrize("way", ["uplink", "downlink"])
async def test_a_cancelled_probe_leaves_nothing_behind(way: str) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    class Watched(ProbeDoor):
        @contextmanager
        def one_more(self, caller: str) -> Iterator[Callable[[], None]]:
            try:
                with super().one_more(caller) as admit_data:
                    yield admit_data
            finally:
                over.set()

    async def measure(address: str) -> None:
        async with probe_peer(address, B.peer, credentials(A.peer)) as found:
            await found.round_trip(1)
            begun.set()
            await getattr(found, way)(3.0)

    async with serving(Watched(1, lambda: 0.0)) as (_, address):
        measuring = asyncio.create_task(measure(address))
        await begun.wait()
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        async with asyncio.timeout(20):
            await over.wait()
        assert is_measured(await way_to(address))


async def test_malformed_probes_do_not_harm_a_peer(listening: tuple[LinkServer, str]) -> None:
    address = listening[1]
    channel = open_channel(address, credentials(A.peer), tls_name(B.peer), stream_options())
    calls = (
        (channel.stream_stream("/hetnode.v1.StageLink/Probe"), b"\xff\xff"),
        (pb_grpc.StageLinkStub(channel).Probe, pb.ProbeMessage(fill=math.nan)),
        (pb_grpc.StageLinkStub(channel).Probe, pb.ProbeMessage()),
    )
    for open_call, message in calls:
        call = open_call()
        await call.read()
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await channel.close()
    assert is_measured(await way_to(address))
