"""The speed of a link on this machine, against a raw asyncio echo of the same messages over plain TCP.

    python -m benchmarks.link            # about 3 minutes
    python -m benchmarks.link --quick    # below 30 s

Two processes on uvloop, like the main processes of two nodes, exchange messages over loopback while a thread
of the measuring process computes. Each message is sent, echoed and received, with a few of them in flight.
The link is the production one, with mutual TLS. It is compared with the same link without TLS, which no node
offers, and with asyncio's streams over plain TCP and over TLS. All take turns in short slices, and a ratio is
the median over neighbouring slices, because other work on the machine slows all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import grpc
import psutil
import uvloop

from benchmarks.processes import credentials_of, pems_of
from benchmarks.tables import Table
from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.link_dialer import dial
from node.net.link_handshake import stream_options
from node.net.link_server import LinkServer
from node.security.credentials import Credentials
from protocol.errors import HetnodeError
from protocol.trust.names import tls_name
from protocol.types import DType, Frame, FrameId, FrameKind, PeerId, TensorHeader
from protocol.wire.link_message import LinkMessage
from tests.support.certificates import credentials

UPPER, LOWER = (
    LinkMember("run", "hash", PeerId(name), 0, position) for position, name in enumerate(("upper", "lower"))
)
LIMITS = LinkLimits(frame_bytes=8 << 20, waiting_frames=16)
SERVICE = "hetnode.v1.StageLink"
SLICE_BYTES = 24 << 20
WAIT = 60.0
_LENGTH = struct.Struct("<I")
_STREAM_LIMIT = 4 << 20  # asyncio's own 64 KiB would hold the raw echo up
_TCP_INFO_BYTES, _ACKED_AND_RECEIVED = 256, slice(120, 136)  # struct tcp_info of Linux


class Echo(Protocol):
    """One connection to the other process, which sends everything back."""

    async def send(self, number: int, payload: bytes) -> None: ...

    async def receive(self, number: int) -> bytes: ...


@dataclass
class RawEcho:
    """asyncio's streams; a length precedes each message."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, number: int, payload: bytes) -> None:
        self.writer.write(_LENGTH.pack(len(payload)))
        self.writer.write(payload)
        await self.writer.drain()

    async def receive(self, number: int) -> bytes:
        (size,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
        return await self.reader.readexactly(size)


@dataclass
class LinkEcho:
    """A link: forward frames in one direction, backward frames in the other."""

    link: LiveLink
    there: FrameKind = FrameKind.FORWARD
    back: FrameKind = FrameKind.BACKWARD

    async def send(self, number: int, payload: bytes) -> None:
        tensor = TensorHeader("x", DType.U8, (len(payload),))
        await self.link.send(Frame(_id(number, self.there), (tensor,), payload), WAIT)

    async def receive(self, number: int) -> bytes:
        return (await self.link.take(_id(number, self.back), WAIT)).payload


def _id(number: int, kind: FrameKind) -> FrameId:
    return FrameId(1, 1, 0, number, kind)


async def send_back(echo: Echo, first: int = 0) -> None:
    """Send everything back in order, until the stream ends."""
    with suppress(asyncio.IncompleteReadError, HetnodeError, OSError):
        while True:
            await echo.send(first, await echo.receive(first))
            first += 1


async def exchange(echo: Echo, first: int, count: int, payload: bytes, in_flight: int) -> None:
    """Send `payload` `count` times, numbered from `first`, and wait for all echoes."""
    room = asyncio.Semaphore(in_flight)

    async def send() -> None:
        for number in range(first, first + count):
            await room.acquire()
            await echo.send(number, payload)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        for number in range(first, first + count):
            await echo.receive(number)
            room.release()


# The echoing process


async def serve(shown: Credentials) -> None:
    """Listen for all kinds of connection, print the ports as JSON, and echo until standard input ends."""
    own_end = (FrameKind.BACKWARD, FrameKind.FORWARD)

    async def echo_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send_back(RawEcho(reader, writer))
        writer.close()

    async def echo_link() -> None:
        while True:
            with suppress(HetnodeError):
                await send_back(LinkEcho(await server.accept(LOWER, UPPER, LIMITS, WAIT), *own_end))

    async def echo_plain(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await send_back(LinkEcho(LiveLink(UPPER, context.read, context.write, LIMITS), *own_end))

    server = LinkServer(lambda: shown)
    link_port = await server.start("127.0.0.1", 0)
    plain = grpc.aio.server(options=stream_options())
    handler = grpc.stream_stream_rpc_method_handler(echo_plain, LinkMessage.from_bytes, LinkMessage.to_bytes)
    plain.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Exchange": handler}),))
    plain_port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    tls = _tls(ssl.PROTOCOL_TLS_SERVER, shown)
    raw = [
        await asyncio.start_server(echo_stream, "127.0.0.1", 0, ssl=context, limit=_STREAM_LIMIT)
        for context in (None, tls)
    ]
    ports = [link_port, plain_port, *(each.sockets[0].getsockname()[1] for each in raw)]
    print(json.dumps(ports), flush=True)
    echoing = asyncio.create_task(echo_link())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    echoing.cancel()


def _tls(protocol: int, shown: Credentials) -> ssl.SSLContext:
    """Mutual TLS for asyncio, as links have it."""
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=shown.authority.decode())
    with TemporaryDirectory() as folder:
        certificate, key = Path(folder, "certificate"), Path(folder, "key")
        certificate.write_bytes(shown.certificate)
        key.write_bytes(shown.key)
        context.load_cert_chain(certificate, key)
    return context


@contextmanager
def echoing_process() -> Iterator[tuple[int, list[int]]]:
    """Process id, and the ports of: the link, the link without TLS, TCP, TLS."""
    command = [sys.executable, "-m", "benchmarks.link", "--echo"]
    shown = pems_of(credentials(LOWER.peer))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(shown) + "\n")
            process.stdin.flush()
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.kill()


# The measuring process


class Computing(threading.Thread):
    """A thread that multiplies matrices until it is stopped. `seconds` is its processor time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds, self.is_under_way, self._is_over = 0.0, threading.Event(), threading.Event()

    def run(self) -> None:
        import torch  # noqa: PLC0415  the echoing process needs none

        torch.set_num_threads(1)
        matrix = torch.randn(512, 512)
        while not self._is_over.is_set():
            matrix = torch.tanh(matrix @ matrix)
            self.seconds = time.thread_time()
            self.is_under_way.set()

    def stop(self) -> None:
        self._is_over.set()
        self.join()


@dataclass
class Measured:
    """One kind of connection, one size: seconds of each slice; bytes echoed and processor seconds of all."""

    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0
    processor: float = 0.0
    on_the_wire: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second that are sent and come back."""
        return self.nbytes / len(self.seconds) / statistics.median(self.seconds)

    @property
    def framing(self) -> float:
        """Bytes on the socket beyond the messages, as a share of the messages; 0 if they are not counted."""
        return max(0.0, self.on_the_wire / (2 * self.nbytes) - 1)

    def against(self, other: Measured) -> float:
        """Speed relative to `other`: the median over neighbouring slices."""
        return statistics.median(
            theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True)
        )


class ResumableTrial:
    """The open connections by name, and the clocks of both processes."""

    def __init__(self, ways: dict[str, tuple[Echo, int]], processor: Callable[[], float]) -> None:
        self._ways, self._processor = ways, processor
        self._sent = Counter[str]()

    async def measure(self, size: int, in_flight: int, slices: int) -> dict[str, Measured]:
        """`slices` slices of each connection in turn, with messages of `size` bytes."""
        payload, count = os.urandom(size), max(2 * in_flight, SLICE_BYTES // size)
        found = {name: Measured() for name in self._ways}
        for turn in range(slices + 1):
            for name, (echo, port) in self._ways.items():
                wire, used, began = _on_the_wire(port), self._processor(), time.perf_counter()
                await exchange(echo, self._sent[name], count, payload, in_flight)
                seconds, into = time.perf_counter() - began, found[name]
                if turn:  # connections start slowly
                    into.seconds.append(seconds)
                    into.nbytes += count * size
                    into.processor += self._processor() - used
                    into.on_the_wire += _on_the_wire(port) - wire
                self._sent[name] += count
        return found


def _on_the_wire(port: int) -> int:
    """Bytes that this process has exchanged with `port`, counted by the kernel; 0 if it does not count."""
    total = 0
    for name in os.listdir("/proc/self/fd") if hasattr(socket, "TCP_INFO") else ():
        with suppress(OSError):  # not a socket, or not connected
            borrowed = socket.socket(fileno=int(name))
            try:
                if borrowed.getpeername()[1] == port:
                    told = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    total += sum(struct.unpack("=QQ", told[_ACKED_AND_RECEIVED]))
            except (IndexError, TypeError):  # of another family
                pass
            finally:
                borrowed.detach()
    return total


async def measure(cases: Sequence[tuple[int, int]], slices: int) -> list[dict[str, Measured]]:
    """For each size in bytes and number of messages in flight: a measurement of each connection."""
    with echoing_process() as (pid, (link_port, plain_port, tcp_port, tls_port)):
        shown = credentials(UPPER.peer)
        link = await dial(f"127.0.0.1:{link_port}", UPPER, LOWER, LIMITS, WAIT, shown)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{plain_port}", options=stream_options())
        call: Any = channel.stream_stream(
            f"/{SERVICE}/Exchange", LinkMessage.to_bytes, LinkMessage.from_bytes
        )()
        plain = LiveLink(LOWER, call.read, call.write, LIMITS)
        tcp = await asyncio.open_connection("127.0.0.1", tcp_port, limit=_STREAM_LIMIT)
        tls = await asyncio.open_connection(
            "127.0.0.1",
            tls_port,
            limit=_STREAM_LIMIT,
            ssl=_tls(ssl.PROTOCOL_TLS_CLIENT, shown),
            server_hostname=tls_name(LOWER.peer),
        )
        ways: dict[str, tuple[Echo, int]] = {
            "tcp": (RawEcho(*tcp), tcp_port),
            "link": (LinkEcho(link), link_port),
            "plain": (LinkEcho(plain), plain_port),
            "tls": (RawEcho(*tls), tls_port),
        }
        computing, other = Computing(), psutil.Process(pid)
        computing.start()
        await asyncio.to_thread(computing.is_under_way.wait)

        def processor() -> float:
            theirs = other.cpu_times()
            return time.process_time() - computing.seconds + theirs.user + theirs.system

        try:
            measurement = ResumableTrial(ways, processor)
            return [await measurement.measure(size, in_flight, slices) for size, in_flight in cases]
        finally:
            await asyncio.to_thread(computing.stop)
            await link.close()
            await plain.close()
            await channel.close()
            for _, writer in (tcp, tls):
                writer.close()


def table(quick: bool) -> Table:
    """Four sizes, one message at a time and four in flight; `quick` a part of that."""
    cases = (
        [(1 << 18, 4), (1 << 20, 4)] if quick else [(1 << n, few) for few in (1, 4) for n in range(18, 22)]
    )
    found = uvloop.run(measure(cases, 7 if quick else 15))
    rows = [
        (
            f"{size >> 10}",
            f"{in_flight}",
            *(f"{ways[name].rate / 1e6:.0f}" for name in ("tcp", "tls", "link", "plain")),
            f"{ways['link'].against(ways['tcp']):.2f}",
            f"{ways['plain'].against(ways['tcp']):.2f}",
            f"{ways['link'].against(ways['tls']):.2f}",
            " / ".join(f"{1e9 * ways[name].processor / ways[name].nbytes:.1f}" for name in ways),
            f"{ways['link'].framing:.2%}",
        )
        for (size, in_flight), ways in zip(cases, found, strict=True)
    ]
    return Table(
        "A link against a raw echo",
        "python -m benchmarks.link" + (" --quick" if quick else ""),
        (
            "message, KiB",
            "in flight",
            "TCP, MB/s",
            "TLS, MB/s",
            "link, MB/s",
            "link without TLS, MB/s",
            "link / TCP",
            "link without TLS / TCP",
            "link / TLS",
            "processor, ms per MB: TCP / link / without TLS / TLS",
            "framing of the link",
        ),
        tuple(rows),
        (
            "MB/s that are sent and come back on loopback while a thread computes; both processes on uvloop.",
            "TCP and TLS are asyncio's streams.",
            "Every link has mutual TLS; plain TCP has to encrypt nothing.",
            "Processor: of both processes together, without the computing thread; of all figures it depends "
            "least on what else the machine does.",
            "Framing: bytes on the TCP socket (gRPC, HTTP/2, TLS) beyond those of the messages.",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What a link carries, against a raw TCP echo.")
    parser.add_argument("--quick", action="store_true", help="two sizes, fewer slices")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        shown = json.loads(sys.stdin.readline())
        uvloop.run(serve(credentials_of(shown)))
    else:
        print(table(options.quick).markdown)


if __name__ == "__main__":
    main()
