"""What a node knows of its links and its speed from what flows anyway, and when it tells."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net import link
from node.net.estimates import LEAST_FRAME_BYTES, FrameRate, LiveEstimates
from node.net.link import Link, LinkLimits, Place
from protocol import convert
from protocol.framing import CHUNK_BYTES, chunks
from protocol.pb import hetnode_pb2 as pb
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
from tests.virtual.loop import run as run_virtually

CAPACITY = Capacity("cpu", 2**30, 2, flops=1e9, uplink=1e6, downlink=1e7, round_trip=0.02)
A, B = PeerId("a"), PeerId("b")


def estimates() -> LiveEstimates:
    return LiveEstimates(CAPACITY)


def told(live: LiveEstimates, at: float) -> Estimates | None:
    """What is told at that time, which the coordinator then has heard."""
    news = live.news(at)
    if news is not None:
        live.told(news, at)
    return news


# The rate of a link


def test_frames_of_one_rate_show_it_as_soon_as_there_are_a_few() -> None:
    rate = FrameRate()
    for _ in range(3):
        rate.frame(10**6, 0.5)
        assert rate.bandwidth == 0.0
    rate.frame(10**6, 0.5)
    assert rate.bandwidth == 2e6


def test_a_sender_that_computes_meanwhile_does_not_make_the_link_look_slow() -> None:
    rate = FrameRate()
    for number in range(64):
        rate.frame(10**6, 0.5 if number % 3 == 0 else 0.5 + number % 7)
    assert rate.bandwidth == pytest.approx(2e6)


def test_a_few_frames_that_waited_in_buffers_do_not_make_it_look_fast() -> None:
    rate = FrameRate()
    for number in range(64):
        rate.frame(10**6, 1e-6 if number % 8 == 0 else 0.5)
    assert rate.bandwidth == pytest.approx(2e6)


def test_a_link_that_became_slower_or_faster_is_noticed() -> None:
    rate = FrameRate()
    for seconds in (0.1, 1.0, 0.01):
        for _ in range(32):
            rate.frame(10**6, seconds)
        assert rate.bandwidth == pytest.approx(10**6 / seconds)


@pytest.mark.parametrize(("nbytes", "seconds"), [(LEAST_FRAME_BYTES - 1, 1.0), (10**6, 0.0), (10**6, -1.0)])
def test_frames_that_say_nothing_do_not_count(nbytes: int, seconds: float) -> None:
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
    """A link's stream on a virtual clock whose wire carries so many bytes per second."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._wire: asyncio.Queue[pb.LinkMessage] = asyncio.Queue()

    async def write(self, frame: Frame) -> None:
        header = convert.frame_header_to_pb(frame.id, frame.tensors)
        self._wire.put_nowait(pb.LinkMessage(header=header))
        for chunk in chunks(frame):
            self._wire.put_nowait(pb.LinkMessage(chunk=bytes(chunk)))

    async def read(self) -> Any:
        message = await self._wire.get()
        await asyncio.sleep(message.ByteSize() / self._bandwidth)
        return message

    async def end(self) -> Any:
        return grpc.aio.EOF


def frame(microbatch: int, size: int) -> Frame:
    frame_id = FrameId(1, 1, 0, microbatch, 0, FrameKind.FORWARD)
    return Frame(frame_id, (TensorHeader("t", DType.U8, (size,)),), bytes(size))


@pytest.mark.parametrize("size", [LEAST_FRAME_BYTES, CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
@pytest.mark.parametrize("pause", [0.0, 2.0])
def test_the_receiving_end_of_a_link_finds_its_bandwidth(
    monkeypatch: pytest.MonkeyPatch, size: int, pause: float
) -> None:
    """Also where its sender computes for longer than it sends."""

    async def main() -> Estimates:
        monkeypatch.setattr(link, "clock", asyncio.get_running_loop().time)
        live, wire = estimates(), Narrow(1.25e6)
        here = Link(Place("run", "hash", A, 0, 0), wire.read, wire.end, LinkLimits(2**23, 8), live.received)
        for number in range(8):
            await wire.write(frame(number, size))
            await here.take(frame(number, size).id, 60)
            await asyncio.sleep(pause)
        await here.close()
        return live.now

    (found,) = run_virtually(main()).links
    assert found.peer == A
    assert found.incoming == pytest.approx(1.25e6, rel=0.01)


def test_what_waited_for_room_here_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[int]:
        monkeypatch.setattr(link, "clock", asyncio.get_running_loop().time)
        timed: list[int] = []
        wire = Narrow(1.25e6)
        here = Link(
            Place("run", "hash", A, 0, 0),
            *(wire.read, wire.end, LinkLimits(2**23, 2)),
            lambda peer, nbytes, seconds: timed.append(nbytes),
        )
        for number in range(5):
            await wire.write(frame(number, LEAST_FRAME_BYTES + number))
        await asyncio.sleep(60)  # the inbox is full, and a third frame waits before it
        for number in range(5):
            await here.take(frame(number, LEAST_FRAME_BYTES + number).id, 60)
        await here.close()
        return timed

    timed = run_virtually(main())
    assert timed[:3] == [LEAST_FRAME_BYTES + number for number in range(3)]
    assert LEAST_FRAME_BYTES + 3 not in timed


# What is told, and when


def test_what_was_told_when_joining_is_no_news() -> None:
    assert estimates().news(0.0) is None


def test_a_value_is_told_when_it_has_moved_by_more_than_a_fifth() -> None:
    live = estimates()
    live.capacity = replace(CAPACITY, uplink=1.15e6)
    assert told(live, 0.0) is None
    live.capacity = replace(CAPACITY, uplink=0.7e6)
    news = told(live, 1.0)
    assert news is not None
    assert news.capacity.uplink == 0.7e6
    assert told(live, 100.0) is None


@pytest.mark.parametrize("field", ["flops", "uplink", "downlink", "round_trip"])
def test_a_value_that_was_not_known_before_is_news(field: str) -> None:
    live = LiveEstimates(replace(CAPACITY, **{field: 0.0}))
    assert live.news(0.0) is None
    live.capacity = CAPACITY
    assert told(live, 0.0) == Estimates(CAPACITY)


def test_news_wait_a_little_for_each_other() -> None:
    live = estimates()
    live.replica_took(1.0)
    assert told(live, 10.0) is not None
    live.replica_took(2.0)
    assert told(live, 12.0) is None
    news = told(live, 15.0)
    assert news is not None
    assert news.microbatch_seconds == 2.0


def test_what_was_not_heard_is_told_again() -> None:
    live = estimates()
    live.replica_took(1.0)
    assert live.news(0.0) == live.news(0.0)


def test_the_ways_to_others_are_told_and_renewed() -> None:
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


def test_a_peer_of_which_nothing_is_known_yet_is_not_told() -> None:
    live = estimates()
    live.received(A, 10**6, 1.0)
    assert live.now.links == ()


def test_speed_is_the_middle_of_the_last_rounds() -> None:
    live = estimates()
    for flops in (2e9, 1e6, 2.2e9):  # in one of them the machine did something else
        live.computed(flops, 1.0)
    assert live.capacity.flops == 2e9
    live.computed(0.0, 1.0)
    live.computed(1.0, 0.0)
    assert live.capacity.flops == 2e9


def test_a_coordinator_that_was_joined_again_is_told_all_but_what_joining_said() -> None:
    live = estimates()
    live.computed(5e9, 1.0)
    live.probed(A, 0.01, 1e6, 2e6)
    assert told(live, 0.0) is not None
    assert told(live, 10.0) is None
    live.joined()
    assert told(live, 10.5) == live.now


def test_no_more_peers_are_told_than_a_message_may_name() -> None:
    live = estimates()
    for number in range(200):
        live.echoed(PeerId(f"peer-{number}"), 0.01)
    assert len(live.now.links) == convert.MAX_ESTIMATES
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
def test_the_coordinator_is_never_far_from_what_is_known(calls: list[Any]) -> None:
    """Whatever happens, what is told may travel, comes not too often, and nothing stays untold for long."""
    live, at, before = estimates(), 0.0, -100.0
    for (name, arguments), pause in calls:
        getattr(live, name)(*arguments)
        at += pause
        news = told(live, at)
        if news is not None:
            assert convert.estimates_from_pb(convert.estimates_to_pb(news)) == news
            assert at >= before + 5.0
            before = at
    told(live, at + 30.0)
    assert live.news(at + 60.0) is None
