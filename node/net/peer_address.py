"""The address of another peer, as gRPC dials it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from math import inf

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.endpoints import check_address, check_endpoint, split_endpoint
from protocol.trust.host_port import host_port

_MEASURE_SECONDS, _CONNECTIONS = 2.0, 3

Through = Callable[[str], Awaitable[str]]
"""The ``host:port`` to dial instead of that of a peer; see node.net.reach."""


async def directly(endpoint: str) -> str:
    """The `endpoint` itself."""
    return endpoint


async def target_of(endpoint: str, peer: str) -> str:
    """gRPC's target for the `endpoint` of `peer`: addresses that a peer may have, and nothing else.

    A name is resolved here and not by gRPC: it could resolve to another address after the check.

    Raises:
        HetnodeError: NEIGHBOUR_UNREACHABLE if no peer may have the endpoint or any address behind its name.
        OSError: the name does not resolve, now at least.
    """
    addresses, port = await _permitted(endpoint, peer)
    return _target(addresses, port)


async def address_of(endpoint: str, peer: str) -> tuple[str, int]:
    """IP address and port for the `endpoint` of `peer`. Raises as :func:`target_of`."""
    addresses, port = await _permitted(endpoint, peer)
    return addresses[0][1], port


async def round_trip(endpoint: str, peer: str) -> float:
    """Seconds to `endpoint` and back: the shortest in which a connection opens; infinite if none does."""
    clock, shortest = asyncio.get_running_loop().time, inf
    with suppress(OSError, TimeoutError, HetnodeError):
        async with asyncio.timeout(_MEASURE_SECONDS):
            address = await address_of(endpoint, peer)
            for _ in range(_CONNECTIONS):
                began = clock()
                _, writer = await asyncio.open_connection(*address)
                shortest = min(shortest, clock() - began)
                writer.transport.abort()
    return shortest


async def _permitted(endpoint: str, peer: str) -> tuple[list[tuple[int, str]], int]:
    """The addresses behind `endpoint` that a peer may have, at least one, each with its family; the port."""
    try:
        check_endpoint(endpoint)
        host, port = split_endpoint(endpoint)
    except ValueError as error:
        raise _refused(endpoint, peer, str(error)) from None
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    permitted: list[tuple[int, str]] = []
    why = ""
    for family, _, _, _, (address, *_) in found:
        try:
            check_address(ip_address(address))
        except ValueError as error:
            why = str(error)
        else:
            permitted.append((family, str(address)))
    if not permitted:
        raise _refused(endpoint, peer, why)
    return permitted, port


def _target(addresses: Sequence[tuple[int, str]], port: int) -> str:
    """gRPC takes several addresses of one family."""
    first, _ = addresses[0]
    scheme = "ipv6" if first == socket.AF_INET6 else "ipv4"
    return f"{scheme}:" + ",".join(host_port(each, port) for family, each in addresses if family == first)


def _refused(endpoint: str, peer: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NEIGHBOUR_UNREACHABLE,
        f"The endpoint {endpoint} of {peer} is not dialled: {why}.",
        "That peer must give --advertise with a name or address under which the others reach its machine.",
    )
