"""What a node knows of its links and its speed from what flows anyway, and when it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net import link
from node.net.link import LinkLimits, LinkMember, LiveLink, Received
from node.net.live_estimates import LEAST_FRAME_BYTES, FrameRate, LiveEstimates
from protocol.server.line import Line, LineLimits
from protocol.types import (
    Capacity,
    DType,
    Estimates,
    Frame,
    FrameId,
    FrameKind,
    LinkEstimate,
    PeerId,
    TensorHeader,
)
from protocol.wire.convert.plans import MAX_ESTIMATES, estimates_from_pb, estimates_to_pb
from protocol.wire.framing import CHUNK_BYTES
from protocol.wire.link_message import LinkMessage
from tests.virtual.loop import run as run_virtually

CAPACITY = Capacity("cpu", 2**30, 2, flops=1e9, uplink=1e6, downlink=1e7, round_trip=0.02)
A, B = PeerId("a"), PeerId("b")


def estimates() -> LiveEstimates:
    return LiveEstimates(CAPACITY)


def told(live: LiveEstimates, at: float) -> Estimates | None:
    """What is told at that time, which the coordinator then has heard."""
    news = live.due(at)
    if news is not None:
        live.reported(news, at)
    return news


# The rate of a link


def test_a_constant_rate_is_found_after_a_few_frames() -> None:
    rate = FrameRate()
    for _ in range(3):
        rate.frame(10**6, 0.5)
        assert rate.bandwidth == 0.0
    rate.frame(10**6, 0.5)
    assert rate.bandwidth == 2e6


def test_pauses_of_the_sender_do_not_lower_the_estimate() -> None:
    rate = FrameRate()
    for number in range(64):
        rate.frame(10**6, 0.5 if number % 3 == 0 else 0.5 + number % 7)
    assert rate.bandwidth == pytest.approx(2e6)


def test_a_few_buffered_frames_do_not_raise_the_estimate() -> None:
    rate = FrameRate()
    for number in range(64):
        rate.frame(10**6, 1e-6 if number % 8 == 0 else 0.5)
    assert rate.bandwidth == pytest.approx(2e6)


def test_the_estimate_follows_a_link_that_becomes_slower_or_faster() -> None:
    rate = FrameRate()
    for seconds in (0.1, 1.0, 0.01):
        for _ in range(32):
            rate.frame(10**6, seconds)
        assert rate.bandwidth == pytest.approx(10**6 / seconds)


@pytest.mark.parametrize(("nbytes", "seconds"), [(LEAST_FRAME_BYTES - 1, 1.0), (10**6, 0.0), (10**6, -1.0)])
def test_frames_without_information_do_not_count(nbytes: int, seconds: float) -> None:
    rate = FrameRate()
    for _ in range(10):
        rate.frame(nbytes, seconds)
    assert rate.bandwidth == 0.0


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1e9)), max_size=100))
def test_a_rate_lies_between_the_slowest_and_the_fastest_frame(frames: list[tuple[int, float]]) -> None:
    rate = FrameRate()
    for nbytes, seconds in frames:
        rate.frame(nbytes, seconds)
    rates = [n / s for n, s in frames if n >= LEAST_FRAME_BYTES and s > 0][-32:]
    assert rate.bandwidth == 0.0 or min(rates) <= rate.bandwidth <= max(rates)


class Narrow:
    """A link's stream on a virtual clock. One direction has a bandwidth in bytes per second."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self.sent: list[LinkMessage] = []
        self._wire: asyncio.Queue[LinkMessage] = asyncio.Queue()

    async def write(self, message: LinkMessage) -> None:
        self.sent.append(message)
        self._wire.put_nowait(message)

    async def read(self) -> LinkMessage:
        message = await self._wire.get()
        await asyncio.sleep(len(message.to_bytes()) / self._bandwidth)
        return message

    async def nothing(self) -> Any:
        await asyncio.Event().wait()

    def ends(self, received: Received, waiting_frames: int = 8) -> tuple[LiveLink, LiveLink]:
        """The sending link, and the receiving one."""
        limits = LinkLimits(2**23, waiting_frames)
        sender = LiveLink(LinkMember("run", "hash", B, 0, 1), self.nothing, self.write, limits)
        here = LinkMember("run", "hash", A, 0, 0)
        return sender, LiveLink(here, self.read, self.nothing, limits, received)


def frame(microbatch: int, size: int) -> Frame:
    frame_id = FrameId(1, 1, 0, microbatch, FrameKind.FORWARD)
    return Frame(frame_id, (TensorHeader("t", DType.U8, (size,)),), bytes(size))


@pytest.mark.parametrize("size", [LEAST_FRAME_BYTES, CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
@pytest.mark.parametrize("pause", [0.0, 2.0])
def test_the_receiving_end_of_a_link_finds_its_bandwidth(
    monkeypatch: pytest.MonkeyPatch, size: int, pause: float
) -> None:
    """Also where its sender computes for longer than it sends."""

    async def main() -> Estimates:
        monkeypatch.setattr(link, "clock", asyncio.get_running_loop().time)
        live = estimates()
        there, here = Narrow(1.25e6).ends(live.received)
        for number in range(8):
            await there.send(frame(number, size), 60)
            await here.take(frame(number, size).id, 60)
            await asyncio.sleep(pause)
        for end in (there, here):
            await end.close()
        return live.now

    (found,) = run_virtually(main()).links
    assert found.peer == A
    assert found.incoming == pytest.approx(1.25e6, rel=0.01)


def test_a_frame_that_waited_for_room_in_the_inbox_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[int]:
        monkeypatch.setattr(link, "clock", asyncio.get_running_loop().time)
        timed: list[int] = []
        there, here = Narrow(1.25e6).ends(lambda peer, nbytes, seconds: timed.append(nbytes), 2)
        for number in range(5):
            await there.send(frame(number, LEAST_FRAME_BYTES + number), 60)
            await asyncio.sleep(1)
        await asyncio.sleep(60)  # the inbox is full, and a third frame waits before it
        for number in range(5):
            await here.take(frame(number, LEAST_FRAME_BYTES + number).id, 60)
        for end in (there, here):
            await end.close()
        return timed

    timed = run_virtually(main())
    assert timed[:3] == [LEAST_FRAME_BYTES + number for number in range(3)]
    assert LEAST_FRAME_BYTES + 3 not in timed


async def exchanged(
    frames: Sequence[Frame], pause: float
) -> tuple[list[LinkMessage], list[Frame], list[int]]:
    """Send the messages of `frames` with pauses in seconds; what came out, and how much was timed."""
    timed: list[int] = []
    wire = Narrow(1e9)
    there, here = wire.ends(lambda peer, nbytes, seconds: timed.append(nbytes), len(frames))
    for each in frames:
        await there.send(each, 60)
        await asyncio.sleep(pause)
    got = [await here.take(each.id, 60) for each in frames]
    for end in (there, here):
        await end.close()
    return wire.sent, got, timed


def test_only_some_headers_are_sent_separately_for_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> tuple[list[LinkMessage], list[Frame], list[int]]:
        monkeypatch.setattr(link, "clock", asyncio.get_running_loop().time)
        return await exchanged(frames, pause=0.03)

    frames = [frame(number, LEAST_FRAME_BYTES) for number in range(8)]
    messages, got, timed = run_virtually(main())
    assert got == frames
    alone = [message.chunk is None for message in messages if message.header is not None]
    assert alone == [True, False, False, False, True, False, False, False]
    assert timed == 2 * [LEAST_FRAME_BYTES]


def test_the_chunks_after_the_first_of_a_large_frame_are_always_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> tuple[list[LinkMessage], list[Frame], list[int]]:
        monkeypatch.setattr(link, "clock", asyncio.get_running_loop().time)
        return await exchanged(frames, pause=0.0)

    frames = [frame(number, 2 * CHUNK_BYTES + 7) for number in range(3)]
    _, got, timed = run_virtually(main())
    assert got == frames
    assert timed == [2 * CHUNK_BYTES + 7, CHUNK_BYTES + 7, CHUNK_BYTES + 7]


def test_small_frames_do_not_delay_the_timing_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[list[LinkMessage], list[Frame], list[int]]:
        monkeypatch.setattr(link, "clock", asyncio.get_running_loop().time)
        return await exchanged(frames, pause=0.0)

    frames = [frame(0, 8), frame(1, LEAST_FRAME_BYTES)]
    messages, got, timed = run_virtually(main())
    assert got == frames
    assert len(messages) == 3
    assert timed == [LEAST_FRAME_BYTES]


# What is told, and when


def test_the_capacity_reported_at_joining_is_not_reported_again() -> None:
    assert estimates().due(0.0) is None


def test_a_value_is_reported_after_a_change_of_more_than_a_fifth() -> None:
    live = estimates()
    live.capacity = replace(CAPACITY, uplink=1.15e6)
    assert told(live, 0.0) is None
    live.capacity = replace(CAPACITY, uplink=0.7e6)
    news = told(live, 1.0)
    assert news is not None
    assert news.capacity.uplink == 0.7e6
    assert told(live, 100.0) is None


@pytest.mark.parametrize("field", ["flops", "uplink", "downlink", "round_trip"])
def test_a_new_value_is_reported(field: str) -> None:
    live = LiveEstimates(replace(CAPACITY, **{field: 0.0}))
    assert live.due(0.0) is None
    live.capacity = CAPACITY
    assert told(live, 0.0) == Estimates(CAPACITY)


def test_reports_are_separated_by_a_pause() -> None:
    live = estimates()
    live.replica_took(1.0)
    assert told(live, 10.0) is not None
    live.replica_took(2.0)
    assert told(live, 12.0) is None
    news = told(live, 15.0)
    assert news is not None
    assert news.microbatch_seconds == 2.0


def test_a_report_that_was_not_received_is_repeated() -> None:
    live = estimates()
    live.replica_took(1.0)
    assert live.due(0.0) == live.due(0.0)


def test_links_to_other_peers_are_reported_and_updated() -> None:
    live = estimates()
    live.probed(A, 0.01, 1e6, 2e6)
    live.echoed(B, 0.03)
    news = told(live, 0.0)
    assert news is not None
    assert set(news.links) == {LinkEstimate(A, 0.01, 1e6, 2e6), LinkEstimate(B, 0.03, 0.0)}
    for _ in range(8):
        live.received(A, 10**6, 1.0)
    news = told(live, 10.0)
    assert news is not None
    assert LinkEstimate(A, 0.01, 1e6, 1e6) in news.links


def test_a_peer_without_measurements_is_not_reported() -> None:
    live = estimates()
    live.received(A, 10**6, 1.0)
    assert live.now.links == ()


def test_speed_is_the_median_of_the_last_rounds() -> None:
    live = estimates()
    for flops in (2e9, 1e6, 2.2e9):  # in one of them the machine did something else
        live.computed(flops, 1.0)
    assert live.capacity.flops == 2e9
    live.computed(0.0, 1.0)
    live.computed(1.0, 0.0)
    assert live.capacity.flops == 2e9


def test_after_joining_again_all_but_the_capacity_is_reported() -> None:
    live = estimates()
    live.computed(5e9, 1.0)
    live.probed(A, 0.01, 1e6, 2e6)
    assert told(live, 0.0) is not None
    assert told(live, 10.0) is None
    live.joined()
    assert told(live, 10.5) == live.now


def test_the_number_of_reported_peers_is_bounded() -> None:
    live = estimates()
    for number in range(200):
        live.echoed(PeerId(f"peer-{number}"), 0.01)
    assert len(live.now.links) == MAX_ESTIMATES
    assert live.now.links[-1].peer == "peer-199"


PEERS = st.sampled_from([A, B])
POSITIVE = st.floats(1.0, 1e6)
SHORTER = st.floats(1.0, 1e4)  # rates below one per second are taken for unknown
CALLS = st.one_of(
    st.tuples(st.just("probed"), st.tuples(PEERS, POSITIVE, POSITIVE, POSITIVE)),
    st.tuples(st.just("echoed"), st.tuples(PEERS, POSITIVE)),
    st.tuples(st.just("received"), st.tuples(PEERS, st.integers(1, 10**9), SHORTER)),
    st.tuples(st.just("computed"), st.tuples(st.floats(1e4, 1e15), SHORTER)),
    st.tuples(st.just("replica_took"), st.tuples(POSITIVE)),
)


@given(st.lists(st.tuples(CALLS, st.floats(0, 10)), max_size=50))
def test_reported_values_stay_close_to_the_measured_ones(calls: list[Any]) -> None:
    """Whatever happens, what is told may travel, comes not too often, and nothing stays untold for long."""
    live, at, before = estimates(), 0.0, -100.0
    for (name, arguments), pause in calls:
        getattr(live, name)(*arguments)
        at += pause
        news = told(live, at)
        if news is not None:
            assert estimates_from_pb(estimates_to_pb(news)) == news
            assert at >= before + 5.0
            before = at
    told(live, at + 30.0)
    assert live.due(at + 60.0) is None


def test_no_estimate_is_above_the_limits_of_the_line(tmp_path: Path) -> None:
    line = Line.create(LineLimits(upload=1e6, download=2e6), tmp_path / "line")
    estimates = LiveEstimates(Capacity("cpu", 1, 1), line)
    assert (estimates.capacity.uplink, estimates.capacity.downlink) == (1e6, 2e6)  # known before any probe
    estimates.capacity = replace(estimates.capacity, uplink=5e5, downlink=1e9)
    assert (estimates.capacity.uplink, estimates.capacity.downlink) == (5e5, 2e6)
    peer = PeerId("neighbour")
    estimates.probed(peer, 0.01, 9e9, 0.0)
    assert [(link.bandwidth, link.incoming) for link in estimates.now.links] == [(1e6, 0.0)]
    for _ in range(32):
        estimates.received(peer, 1 << 20, 1e-3)
    assert [link.incoming for link in estimates.now.links] == [2e6]
