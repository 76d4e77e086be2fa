"""What arrives is passed on meanwhile, but its last byte only when all bytes are known to be right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from node.exchange.arrivals import Arrival
from node.exchange.payload_exchange import PayloadExchange
from node.exchange.payload_store import PayloadStore
from tests.builders import keyed, spec_of


async def followed(arrival: Arrival) -> list[bytes]:
    return [piece async for piece in arrival.pieces(4)]


async def pass_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_last_byte_follows_the_verification() -> None:
    begun: list[Arrival] = []
    arrival = Arrival(10, begun.append)
    early = asyncio.create_task(followed(arrival))
    await pass_turns()
    assert begun == []
    arrival.add(b"012")
    arrival.add(b"3456789")
    assert begun == [arrival]
    await pass_turns()
    assert not early.done()
    arrival.verify()
    assert await early == [b"0123", b"4567", b"8", b"9"]
    assert b"".join(await followed(arrival)) == b"0123456789"


async def test_wrong_or_missing_bytes_end_the_stream_before_its_last_byte() -> None:
    for arrived in (b"0123456789", b"012", b""):
        arrival = Arrival(10, lambda _: None)
        following = asyncio.create_task(followed(arrival))
        if arrived:
            arrival.add(arrived)
        await pass_turns()
        arrival.end()
        assert b"".join(await following) == arrived[:9]


async def test_the_rate_so_far_tells_the_end() -> None:
    arrival = Arrival(10, lambda _: None)
    assert arrival.seconds_left() == float("inf")
    arrival.add(b"01234")
    assert 0 <= arrival.seconds_left() < float("inf")
    arrival.add(b"56789")
    assert arrival.seconds_left() == 0


async def test_a_reader_that_stands_still_keeps_no_payload_of_a_former_exchange(tmp_path: Path) -> None:
    own = keyed(0).payload(spec_of(), 0, 1)
    calls: Any = None
    exchange = PayloadExchange("me", 0, 100, PayloadStore(tmp_path, 2), calls)
    with exchange.arriving(own) as arrival:
        arrival.add(bytes(50))
        pieces = await exchange.pieces("reader", own.owner, 1, own.sha256)
        assert pieces is not None
        assert await anext(pieces) == bytes(50)
        with exchange.exchange(1):
            arrival.add(bytes(50))
        arrival.verify()
    assert len(arrival.data) == 100, "of the newest exchange"
    with exchange.exchange(2):
        assert not arrival.data
        assert [piece async for piece in pieces] == []
