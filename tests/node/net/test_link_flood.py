"""Many connections of one source to the link server of a node: the links of its neighbours go on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from ssl import SSLContext

import pytest

from node.net.link import LiveLink
from node.net.link_dialer import dial
from node.security.channels import open_channel
from protocol.trust.names import tls_name
from protocol.types import DType, Frame, FrameKind, TensorHeader
from tests.support.certificates import credentials
from tests.support.hostile import half_open, stranger_tls
from tests.support.link_acceptor import LIMITS, LOWER, SECONDS, UPPER, numbered

EXCHANGE = "/hetnode.v1.StageLink/Exchange"
DESCRIPTORS, CONNECTIONS, CALLS = 128, 70, 4
SOURCE = "127.0.1.1"


@asynccontextmanager
async def accepting() -> AsyncIterator[str]:
    """The address of a link server in a process of its own, which has few open files."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.link_acceptor", str(DESCRIPTORS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        shown = {name: pem.decode() for name, pem in asdict(credentials(LOWER.peer)).items()}
        process.stdin.write(json.dumps(shown).encode() + b"\n")
        yield f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()
        await process.wait()


async def connect(address: str) -> LiveLink:
    return await dial(address, UPPER, LOWER, LIMITS, SECONDS, credentials(UPPER.peer))


async def echo(link: LiveLink, number: int) -> None:
    frame = Frame(numbered(number), (TensorHeader("t", DType.U8, (100,)),), bytes([number]) * 100)
    await link.send(frame, SECONDS)
    assert (await link.take(numbered(number, FrameKind.BACKWARD), SECONDS)).payload == frame.payload


async def silent_connections(address: str, stack: AsyncExitStack) -> None:
    """More than the process may have open at its start."""
    await connections(address, stack, 2 * DESCRIPTORS, None)


async def strangers_handshakes(address: str, stack: AsyncExitStack) -> None:
    with suppress(OSError):  # a certificate is asked for
        await connections(address, stack, CONNECTIONS, stranger_tls())


async def connections(address: str, stack: AsyncExitStack, count: int, tls: SSLContext | None) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(count):
        ends = await asyncio.open_connection(host, int(port), ssl=tls, local_addr=(SOURCE, 0))
        # asyncio closes a connection whose reader nobody holds.
        stack.callback(lambda ends: ends[1].transport.abort(), ends)


async def half_open_calls_of_a_member(address: str, stack: AsyncExitStack) -> None:
    options = (("grpc.use_local_subchannel_pool", 1),)
    for _ in range(CONNECTIONS):
        channel = open_channel(address, credentials("hoarder"), tls_name(LOWER.peer), options)
        half_open(await stack.enter_async_context(channel), EXCHANGE, CALLS)


@pytest.mark.parametrize("attack", [silent_connections, strangers_handshakes, half_open_calls_of_a_member])
async def test_a_flood_of_one_source_ends_no_link_and_keeps_none_out(
    attack: Callable[[str, AsyncExitStack], Awaitable[None]],
) -> None:
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(accepting())
        link = await connect(address)
        await echo(link, 0)
        await attack(address, stack)
        await echo(link, 1)
        await link.close()
        link = await connect(address)
        await echo(link, 0)
        await link.close()
