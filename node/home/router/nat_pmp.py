"""NAT-PMP, RFC 6886: a router tells its public address and forwards ports. One UDP packet each way."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Self, TypeVar

from node.home.router.interface import Forwarding, RouterError

_Answer = TypeVar("_Answer")

PORT = 5351
MOST_BYTES = 16
"""Of an answer that counts."""

_VERSION, _ADDRESS, _TCP, _IS_ANSWER = 0, 0, 2, 128
_REQUEST = struct.Struct("!BBHHHI")
_HEAD, _REST_OF_FORWARDING = struct.Struct("!BBHI"), struct.Struct("!HHI")
_PROBLEMS = {
    1: "it does not speak this version",
    2: "it is not allowed to by its settings",
    3: "it has no connection to the internet",
    4: "it has no port left",
    5: "it cannot do that",
}
_WAITS = (0.25, 0.5, 1.0)


def address_request() -> bytes:
    return bytes((_VERSION, _ADDRESS))


def forwarding_request(internal: int, external: int, seconds: int) -> bytes:
    """Asks for a TCP port. With `external` and `seconds` 0 the router forwards `internal` no more."""
    return _REQUEST.pack(_VERSION, _TCP, 0, internal, external, seconds)


def read_address(answer: bytes) -> str:
    """The router's address on the internet. Raises RouterError; ValueError if this answers something else."""
    return str(IPv4Address(_body(answer, _ADDRESS, 4)))


def read_forwarding(answer: bytes, internal: int) -> Forwarding:
    """The forwarding of the TCP port `internal`. Raises as :func:`read_address`."""
    port, external, seconds = _REST_OF_FORWARDING.unpack(_body(answer, _TCP, 8))
    if port != internal:
        raise ValueError("the answer to another request")
    return Forwarding(port, external, seconds)


def _body(answer: bytes, operation: int, size: int) -> bytes:
    """What follows the head of a good answer to `operation`."""
    if len(answer) < _HEAD.size:
        raise ValueError("too short")
    version, answered, problem, _ = _HEAD.unpack_from(answer)
    if version != _VERSION or answered != _IS_ANSWER | operation:
        raise ValueError("the answer to another request")
    if problem:
        raise RouterError(_PROBLEMS.get(problem, f"it fails with {problem}"))
    if len(answer) != _HEAD.size + size:
        raise ValueError("of another length")
    return answer[_HEAD.size :]


class NatPmpRouter:
    """The router at `gateway`: see :class:`node.home.router.interface.Router`."""

    protocol = "NAT-PMP"

    def __init__(self, gateway: str, port: int = PORT) -> None:
        self.external = ""
        self._at = (gateway, port)

    @classmethod
    async def find(cls, gateway: str, port: int = PORT) -> Self:
        """Raises RouterError if it does not speak NAT-PMP, after two seconds at most."""
        router = cls(gateway, port)
        router.external = await router.external_address()
        return router

    async def external_address(self) -> str:
        return await self._ask(address_request(), read_address)

    async def forward(self, internal: int, external: int, seconds: int) -> Forwarding:
        request = forwarding_request(internal, external, seconds)
        given = await self._ask(request, lambda answer: read_forwarding(answer, internal))
        if not given.external:
            raise RouterError("it gives port 0")
        return given

    async def stop(self, forwarding: Forwarding) -> None:
        request = forwarding_request(forwarding.internal, 0, 0)
        await self._ask(request, lambda answer: read_forwarding(answer, forwarding.internal))

    async def _ask(self, request: bytes, read: Callable[[bytes], _Answer]) -> _Answer:
        """What `read` makes of the answer; it raises ValueError for one to another request."""
        loop = asyncio.get_running_loop()
        try:
            transport, answers = await loop.create_datagram_endpoint(_Answers, remote_addr=self._at)
        except OSError as error:
            raise RouterError(f"there is no way to it ({error.strerror or error})") from None
        try:
            for seconds in _WAITS:
                transport.sendto(request)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        while True:
                            with suppress(ValueError):
                                return read(await answers.next())
        finally:
            transport.close()
        raise RouterError("it does not answer")


class _Answers(asyncio.DatagramProtocol):
    """The packets of the one address to which the socket is connected. Those too long are dropped."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | OSError] = asyncio.Queue(maxsize=16)

    def datagram_received(self, data: bytes, addr: object) -> None:
        if len(data) <= MOST_BYTES:
            self._put(data)

    def error_received(self, exc: Exception) -> None:
        self._put(RouterError("it does not speak NAT-PMP"))  # the port is closed

    async def next(self) -> bytes:
        answer = await self._waiting.get()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _put(self, answer: bytes | OSError) -> None:
        with suppress(asyncio.QueueFull):
            self._waiting.put_nowait(answer)
