"""NAT-PMP: packets, and a real UDP socket that answers as a router."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.home.router.interface import Forwarding, RouterError
from node.home.router.nat_pmp import (
    NatPmpRouter,
    address_request,
    forwarding_request,
    read_address,
    read_forwarding,
)
from tests.support.nat_pmp_router import nat_pmp_responder
from tests.support.ports import free_port

PORTS = st.integers(1, 65535)


def test_requests_are_those_of_the_standard() -> None:
    assert address_request() == b"\0\0"
    assert forwarding_request(7710, 7710, 3600) == b"\0\2\0\0" + struct.pack("!HHI", 7710, 7710, 3600)


@given(internal=PORTS, external=PORTS, seconds=st.integers(0, 2**32 - 1), epoch=st.integers(0, 2**32 - 1))
def test_a_good_answer_is_read(internal: int, external: int, seconds: int, epoch: int) -> None:
    answer = struct.pack("!BBHIHHI", 0, 130, 0, epoch, internal, external, seconds)
    assert read_forwarding(answer, internal) == Forwarding(internal, external, seconds)
    with pytest.raises(ValueError, match="another request"):
        read_forwarding(answer, internal ^ 1)
    with pytest.raises(ValueError, match="another request"):
        read_address(answer)


@given(st.binary(max_size=64) | st.binary(max_size=24).map(lambda rest: b"\0\x82\0\0" + rest))
def test_no_packet_raises_anything_else(packet: bytes) -> None:
    for read in (read_address, lambda answer: read_forwarding(answer, 7710)):
        with suppress(ValueError, RouterError):
            read(packet)


@given(st.integers(1, 65535))
def test_a_refusal_is_an_error_with_a_reason(problem: int) -> None:
    with pytest.raises(RouterError, match="it "):
        read_address(struct.pack("!BBHI4s", 0, 128, problem, 1, bytes(4)))


async def test_a_router_forwards_renews_and_stops() -> None:
    async with nat_pmp_responder() as (responder, port):
        responder.shift = 3
        router = await NatPmpRouter.find("127.0.0.1", port)
        assert router.external == "44.10.0.101"
        given = await router.forward(7710, 7710, 1200)
        assert given == Forwarding(7710, 7713, 1200)
        assert responder.forwarded == {7710: (7713, 1200)}
        await router.stop(given)
        assert not responder.forwarded


async def test_a_router_that_gives_port_0_forwards_nothing() -> None:
    async with nat_pmp_responder() as (responder, port):
        router = await NatPmpRouter.find("127.0.0.1", port)
        responder.shift = -7710
        with pytest.raises(RouterError, match="port 0"):
            await router.forward(7710, 7710, 1200)


async def test_lost_packets_are_sent_again_and_foreign_ones_dropped() -> None:
    async with nat_pmp_responder() as (responder, port):
        responder.ignored = 1
        responder.noise = (b"", bytes(2000), b"\0\x82\0\0", struct.pack("!BBHIHHI", 0, 130, 0, 1, 9, 9, 9))
        router = await NatPmpRouter.find("127.0.0.1", port)
        assert (await router.forward(7710, 7710, 60)).internal == 7710
        assert responder.requests >= 3


async def test_a_closed_port_is_known_at_once_and_a_refusal_is_named() -> None:
    with pytest.raises(RouterError, match="does not speak NAT-PMP"):
        await NatPmpRouter.find("127.0.0.1", free_port())
    async with nat_pmp_responder() as (responder, port):
        router = await NatPmpRouter.find("127.0.0.1", port)
        responder.problem = 2
        with pytest.raises(RouterError, match="not allowed"):
            await router.forward(7710, 7710, 60)
