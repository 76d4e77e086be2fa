"""Probing a connection: what is measured, what is answered, and what is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api import service
from node.net import probe as probing
from node.net.coordinator_channel import CoordinatorChannel
from node.net.link_handshake import stream_options
from node.net.link_server import LinkServer
from node.net.probe import Figures, Probe, probe_peer
from node.security.channels import open_channel
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.tls import COORDINATOR_NAME, tls_name
from protocol.types import PeerId
from protocol.wire.probing import DATA_BYTES, MAX_DATA_BYTES, Answers, ProbeDoor, answer_all
from tests.builders import keyed, spec_of
from tests.support.certificates import authority, credentials
from tests.support.coordinator_process import Running, running
from tests.virtual.loop import run as run_virtually

T = TypeVar("T")

A, B = keyed(0), keyed(1)
DATA = pb.ProbeMessage(data=bytes(DATA_BYTES))
SHORT = 0.05


def anybody() -> None:
    """Data may move."""


class Wire:
    """One direction of a connection on a virtual clock: so many bytes per second, a delay, a buffer.

    `slow_start`: seconds, from its first message on, in which it has a tenth of that bandwidth.
    """

    def __init__(self, bandwidth: float, delay: float, buffer: int, slow_start: float = 0.0) -> None:
        self._bandwidth, self._delay, self._slow_start = bandwidth, delay, slow_start
        self._waiting: asyncio.Queue[pb.ProbeMessage] = asyncio.Queue(buffer)
        self._arrived: asyncio.Queue[pb.ProbeMessage] = asyncio.Queue()
        self._pumping = asyncio.create_task(self._pump())

    async def write(self, message: pb.ProbeMessage) -> None:
        await self._waiting.put(message)

    async def read(self) -> pb.ProbeMessage:
        return await self._arrived.get()

    async def __aiter__(self) -> AsyncIterator[pb.ProbeMessage]:
        while True:
            yield await self.read()

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        message = await self._waiting.get()
        began = loop.time()
        while True:
            bandwidth = self._bandwidth / (10 if loop.time() - began < self._slow_start else 1)
            await asyncio.sleep(message.ByteSize() / bandwidth)
            loop.call_later(self._delay, self._arrived.put_nowait, message)
            message = await self._waiting.get()

    def close(self) -> None:
        self._pumping.cancel()


def measured(
    up: float, down: float, delay: float, buffer: int = 8, slow_start: float = 0.0
) -> tuple[Figures, float]:
    """What a probe finds over such a connection, and in how many seconds of virtual time."""

    async def main() -> tuple[Figures, float]:
        now = asyncio.get_running_loop().time
        there, back = Wire(up, delay, buffer, slow_start), Wire(down, delay, buffer, slow_start)
        answering = asyncio.create_task(answer_all("me", aiter(there), back.write, now, anybody))
        began = now()
        probe = Probe(back.read, there.write, now)
        await probe.welcome()
        try:
            return await probe.figures(), now() - began
        finally:
            answering.cancel()
            there.close()
            back.close()

    return run_virtually(main())


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.15])
@pytest.mark.parametrize(("up", "down"), [(1.25e6, 1.25e7), (1.25e7, 1.25e6), (2e5, 2e5), (1e8, 1e8)])
def test_the_rates_of_a_shaped_connection_are_found(up: float, down: float, delay: float) -> None:
    figures, _ = measured(up, down, delay)
    assert figures.uplink == pytest.approx(up, rel=0.03)
    assert figures.downlink == pytest.approx(down, rel=0.03)
    assert figures.round_trip == pytest.approx(2 * delay, abs=5e-4)


def test_a_slow_start_and_full_buffers_do_not_change_the_rates() -> None:
    figures, _ = measured(1.25e6, 1.25e6, 0.02, buffer=16, slow_start=0.35)
    assert figures.uplink == pytest.approx(1.25e6, rel=0.05)
    assert figures.downlink == pytest.approx(1.25e6, rel=0.05)


def test_a_very_slow_connection_is_measured_by_the_few_bytes_that_arrived() -> None:
    figures, seconds = measured(20e3, 20e3, 0.05, buffer=1)
    assert figures.uplink == pytest.approx(20e3, rel=0.2)
    assert figures.downlink == pytest.approx(20e3, rel=0.2)
    assert seconds < 60


def test_a_very_fast_connection_moves_no_more_than_a_probe_may() -> None:
    figures, seconds = measured(4e9, 4e9, 0.0)
    assert figures.uplink == pytest.approx(4e9, rel=0.03)
    assert figures.downlink == pytest.approx(4e9, rel=0.03)
    assert seconds < 1


# The calling half does not believe what it is told


class Told:
    """A stream that answers with what was put down for it."""

    def __init__(self, *answers: pb.ProbeMessage) -> None:
        self._answers = list(answers)
        self.time = 0.0

    async def read(self) -> Any:
        self.time += 0.1
        return self._answers.pop(0) if self._answers else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        self.time += 0.1

    def probe(self) -> Probe:
        return Probe(self.read, self.write, lambda: self.time)


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ("welcome", [pb.ProbeMessage(echo=1)]),
        ("welcome", []),
        ("round_trip", [pb.ProbeMessage(echo=7)]),
        ("round_trip", [pb.ProbeMessage(tally=1)]),
        ("round_trip", [pb.ProbeMessage()]),
        ("round_trip", []),
        ("uplink", [pb.ProbeMessage(tally=10**12), pb.ProbeMessage(tally=0)]),
        ("uplink", [pb.ProbeMessage(echo=1)]),
        ("uplink", []),
        ("downlink", [DATA, pb.ProbeMessage(tally=10**12)]),
        ("downlink", [DATA, DATA]),
        ("downlink", [pb.ProbeMessage(fill=1.0)]),
        ("downlink", [DATA] * (MAX_DATA_BYTES // DATA_BYTES + 1)),
    ],
)
async def test_wrong_answers_are_refused(asked: str, answers: list[pb.ProbeMessage]) -> None:
    with pytest.raises(HetnodeError) as refused:
        await getattr(Told(*answers).probe(), asked)()
    assert refused.value.code is ErrorCode.FRAME_CORRUPT


async def test_the_rate_of_an_empty_fill_is_zero() -> None:
    assert await Told(pb.ProbeMessage(tally=0)).probe().downlink() == 0.0


# The answering half


def answers_at(now: Callable[[], float] = lambda: 0.0) -> Answers:
    return Answers(now, anybody)


def refusal(answers: Answers, message: pb.ProbeMessage) -> ErrorCode:
    with pytest.raises(HetnodeError) as refused:
        list(answers.to(message))
    assert refused.value.remedy
    return refused.value.code


def test_a_tally_counts_the_bytes_since_the_last_tally() -> None:
    answers = answers_at()
    for _ in range(3):
        assert list(answers.to(DATA)) == []
    assert [each.tally for each in answers.to(pb.ProbeMessage(tally=0))] == [3 * DATA_BYTES]
    assert [each.tally for each in answers.to(pb.ProbeMessage(tally=0))] == [0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3.1, math.inf, -math.inf, math.nan])
def test_a_fill_has_bounds(seconds: float) -> None:
    assert refusal(answers_at(), pb.ProbeMessage(fill=seconds)) is ErrorCode.BAD_REQUEST


def test_the_data_of_a_fill_is_bounded_for_any_clock() -> None:
    answers = answers_at(lambda: 0.0)  # it stands still
    sent = 0
    for _ in range(3):
        *data, tally = answers.to(pb.ProbeMessage(fill=1.0))
        assert tally.tally == sum(len(each.data) for each in data)
        sent += tally.tally
    assert sent == MAX_DATA_BYTES


def test_the_total_of_all_fills_of_a_probe_is_bounded() -> None:
    now = 0.0

    def ticking() -> float:
        nonlocal now
        now += 0.1
        return now

    answers = answers_at(ticking)
    for _ in range(3):
        list(answers.to(pb.ProbeMessage(fill=1.0)))
    assert refusal(answers, pb.ProbeMessage(fill=0.1)) is ErrorCode.RATE_LIMITED


def test_data_is_admitted_once_and_echoes_always() -> None:
    asked = []
    answers = Answers(lambda: 0.0, lambda: asked.append(True))
    list(answers.to(pb.ProbeMessage(echo=1)))
    assert not asked
    list(answers.to(DATA))
    list(answers.to(pb.ProbeMessage(fill=1.0)))
    assert asked == [True]


def test_the_data_that_a_caller_sends_is_bounded() -> None:
    answers = answers_at()
    for _ in range(MAX_DATA_BYTES // DATA_BYTES):
        list(answers.to(DATA))
    assert refusal(answers, DATA) is ErrorCode.RATE_LIMITED


def test_the_size_of_a_data_message_is_bounded() -> None:
    assert refusal(answers_at(), pb.ProbeMessage(data=bytes(DATA_BYTES + 1))) is ErrorCode.BAD_REQUEST


def test_the_number_of_messages_of_a_probe_is_bounded() -> None:
    answers = answers_at()
    for number in range(1000):
        assert list(answers.to(pb.ProbeMessage(echo=number))) == [pb.ProbeMessage(echo=number)]
    assert refusal(answers, pb.ProbeMessage(echo=1)) is ErrorCode.RATE_LIMITED


MESSAGES = st.one_of(
    st.builds(pb.ProbeMessage, hello=st.sampled_from(["me", "", "x" * 100])),
    st.builds(pb.ProbeMessage, echo=st.integers(0, 2**64 - 1)),
    st.builds(pb.ProbeMessage, data=st.binary(max_size=100)),
    st.builds(pb.ProbeMessage, tally=st.integers(0, 2**64 - 1)),
    st.builds(pb.ProbeMessage, fill=st.floats()),
    st.just(pb.ProbeMessage()),
)


@given(st.lists(MESSAGES, max_size=20))
def test_any_messages_of_a_caller_are_answered_or_refused(messages: list[pb.ProbeMessage]) -> None:
    answers, sent = answers_at(), 0
    try:
        for message in messages:
            sent += sum(len(reply.data) for reply in answers.to(message))
    except HetnodeError as error:
        assert error.code in (ErrorCode.BAD_REQUEST, ErrorCode.RATE_LIMITED)  # noqa: PT017
    assert sent <= MAX_DATA_BYTES


def test_the_number_and_frequency_of_probes_are_bounded() -> None:
    now = 0.0
    door = ProbeDoor(2, lambda: now)

    def enter(caller: str) -> ErrorCode | None:
        with ExitStack() as stack:
            try:
                stack.enter_context(door.one_more(caller))
            except HetnodeError as error:
                return error.code
        return None

    with door.one_more("a"):
        assert enter("a") is ErrorCode.RATE_LIMITED
        assert enter("b") is None
        with door.one_more("b"):
            assert enter("c") is ErrorCode.RATE_LIMITED
    turns = [enter("a") for _ in range(20)]
    assert turns[0] is None
    assert turns[-1] is ErrorCode.RATE_LIMITED
    now += 60
    assert enter("a") is None


def moves_data(door: ProbeDoor, caller: str) -> bool:
    with door.one_more(caller) as admit_data:
        try:
            admit_data()
        except HetnodeError as error:
            return error.code is not ErrorCode.RATE_LIMITED
    return True


def test_a_caller_may_move_data_a_few_times_and_then_rarely() -> None:
    now = 0.0
    door = ProbeDoor(2, lambda: now)
    moved = 0
    for _ in range(20 * 60):
        now += 60
        moved += moves_data(door, "a")
    assert moved <= 3 + 20 * 60 / 5
    assert moves_data(door, "b"), "others are not to blame"


def test_a_busy_peer_answers_only_echoes() -> None:
    door = ProbeDoor(2, lambda: 0.0)
    door.is_busy = lambda: True
    for _ in range(3):
        assert not moves_data(door, "a")
    door.is_busy = lambda: False
    assert moves_data(door, "a")


# Over real connections


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
    await run.admin.Ban(pb.BanRequest(peer=A.peer))
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
    monkeypatch.setattr(probing, "_MOST_SECONDS", 0.3)

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
