"""Probing a connection: the figures that are measured, and the wrong answers that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from node.net.probe import Figures, LineProbe
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.wire.probing import DATA_BYTES, MAX_DATA_BYTES, answer_all
from tests.virtual.loop import run as run_virtually

DATA = pb.ProbeMessage(data=bytes(DATA_BYTES))


def admit_data() -> None:
    """Data may move."""


class Wire:
    """One direction of a connection on a virtual clock: bandwidth in bytes per second, delay, buffer.

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
        answering = asyncio.create_task(answer_all("me", aiter(there), back.write, now, admit_data))
        began = now()
        probe = LineProbe(back.read, there.write, now)
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

    def probe(self) -> LineProbe:
        return LineProbe(self.read, self.write, lambda: self.time)


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
