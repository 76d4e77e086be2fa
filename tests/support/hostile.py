"""What hostile peers do to a server, and a way for a gRPC client to come from another source."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc


def stranger_tls() -> ssl.SSLContext:
    """TLS without a client certificate, which accepts any server certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def certificate_at(address: str) -> bytes:
    """The certificate that a server shows now, DER."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=stranger_tls())
    try:
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return shown
    finally:
        writer.transport.abort()


async def handshakes(
    address: str, count: int, parallel: int, sources: Sequence[str], seconds: float = 60.0
) -> Counter[str]:
    """Make `count` TLS handshakes from `sources` in turn, `parallel` at a time, and count their ends.

    Args:
        seconds: after so long a handshake counts as "TimeoutError"; a good one as "done".
    """
    host, _, port = address.rpartition(":")
    context, numbers, ended = stranger_tls(), iter(range(count)), Counter[str]()

    async def shake_hands() -> None:
        for number in numbers:
            here = (sources[number % len(sources)], 0)
            try:
                async with asyncio.timeout(seconds):
                    _, writer = await asyncio.open_connection(host, int(port), ssl=context, local_addr=here)
                ended["done"] += 1
                writer.transport.abort()
            except (OSError, TimeoutError) as error:
                ended[type(error).__name__] += 1

    await asyncio.gather(*(shake_hands() for _ in range(parallel)))
    return ended


@asynccontextmanager
async def relay(address: str, source: str) -> AsyncIterator[str]:
    """An address whose connections go on to `address` from the loopback address `source`."""
    host, _, port = address.rpartition(":")
    tasks = set[asyncio.Task[Any]]()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        for one in (copy(reader, back), copy(there, writer)):
            task = asyncio.create_task(one)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()


def half_open(channel: grpc.aio.Channel, method: str, count: int) -> list[Any]:
    """Open calls of the method at this path, and never send a request on them."""
    return [channel.stream_unary(method)() for _ in range(count)]
