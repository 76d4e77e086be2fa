"""The size of chunks: a line that many receivers share passes one chunk for each of them in time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.payload_exchange import PayloadExchange
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import CHUNK_BYTES, CHUNK_SECONDS, RANGES, chunk_bytes, ranges_of, within
from tests.builders import keyed, spec_of

SLOW_LINE = 1_000_000 / 8  # bytes per second


@pytest.mark.parametrize("receivers", [3, 15, 31])
def test_a_slow_line_passes_a_chunk_for_each_receiver_in_time(receivers: int) -> None:
    assert receivers * chunk_bytes(receivers) / SLOW_LINE < CHUNK_SECONDS


def test_a_chunk_has_a_least_and_a_largest_size() -> None:
    assert chunk_bytes(0) == chunk_bytes(1) == CHUNK_BYTES
    assert chunk_bytes(1000) == chunk_bytes(10_000) >= 16 * 1024


async def test_the_chunks_of_a_large_group_are_small(tmp_path: Path) -> None:
    class Calls:
        async def fetch(self, *_: object) -> bytes:
            await asyncio.Event().wait()
            return b""

    payload = bytes(CHUNK_BYTES)
    own, *others = (keyed(number).payload(spec_of(), 0, 1) for number in range(17))
    own = replace(own, nbytes=len(payload), sha256=hashlib.sha256(payload).hexdigest())
    calls: Any = Calls()
    exchange = PayloadExchange(own.owner, 0, len(payload), PayloadStore(tmp_path, 2), calls)
    await exchange.hold(own, payload)
    with exchange.exchange(1):
        gathering = asyncio.create_task(exchange.gather(own, others, 60.0, push=False))
        await exchange.wait_for_turn(others[0].owner, own.owner, 1, own.sha256)
        pieces = await exchange.pieces(others[0].owner, own.owner, 1, own.sha256)
        assert pieces is not None
        assert [len(piece) async for piece in pieces] == [chunk_bytes(16)] * (CHUNK_BYTES // chunk_bytes(16))
        exchange.break_off()
        await gathering


@given(st.integers(0, 1 << 40), st.integers(1, 5))
def test_ranges_cover_a_payload_without_overlap(nbytes: int, members: int) -> None:
    ranges = ranges_of(nbytes, members)
    assert len(ranges) == (RANGES if members == 2 and nbytes >= 1 << 20 else 1)
    assert [first for first, _ in ranges] == [sum(size for _, size in ranges[:i]) for i in range(len(ranges))]
    assert sum(size for _, size in ranges) == nbytes
    assert all(size > 0 for _, size in ranges) or not nbytes


@given(st.lists(st.binary(max_size=5), max_size=6), st.integers(0, 40), st.integers(0, 1 << 64))
def test_a_range_has_the_bytes_that_there_are(pieces: list[bytes], first: int, nbytes: int) -> None:
    async def each() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def joined() -> bytes:
        return b"".join([part async for part in within(each(), first, nbytes)])

    assert asyncio.run(joined()) == b"".join(pieces)[first : first + nbytes]
