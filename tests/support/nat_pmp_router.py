"""A router that speaks NAT-PMP at a UDP port of this machine, as far as a node sees. It forwards nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from typing import cast


class NatPmpResponder(asyncio.DatagramProtocol):
    """Answers by RFC 6886.

    Attributes:
        external: its public address.
        forwarded: public port and seconds of each forwarded port.
        lifetime: the most seconds that it grants.
        shift: added to the port that is asked for.
        problem: the result code of every answer.
        ignored: how many requests it leaves unanswered from now on.
        noise: packets that it sends before each answer.
    """

    def __init__(self) -> None:
        self.external, self.lifetime, self.shift, self.problem, self.ignored = "44.10.0.101", 7200, 0, 0, 0
        self.noise: tuple[bytes, ...] = ()
        self.forwarded: dict[int, tuple[int, int]] = {}
        self.requests = 0
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self.requests += 1
        if self.ignored:
            self.ignored -= 1
            return
        for packet in (*self.noise, self._answer(data)):
            self._transport.sendto(packet, addr)

    def _answer(self, request: bytes) -> bytes:
        version, operation = request[:2]
        head = struct.pack("!BBHI", version, 128 + operation, self.problem, 1)
        if operation == 0:
            assert len(request) == 2
            return head + IPv4Address(self.external).packed
        _, _, reserved, internal, external, seconds = struct.unpack("!BBHHHI", request)
        assert (version, operation, reserved) == (0, 2, 0)
        seconds = min(seconds, self.lifetime)
        if seconds:
            external += self.shift
            self.forwarded[internal] = external, seconds
        else:
            assert not external
            self.forwarded.pop(internal, None)
        return head + struct.pack("!HHI", internal, external, seconds)


@asynccontextmanager
async def nat_pmp_responder() -> AsyncIterator[tuple[NatPmpResponder, int]]:
    """A running one, and its port on 127.0.0.1."""
    loop = asyncio.get_running_loop()
    transport, responder = await loop.create_datagram_endpoint(NatPmpResponder, local_addr=("127.0.0.1", 0))
    try:
        yield responder, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()
