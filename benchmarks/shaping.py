"""Links of a chosen bandwidth between processes of this machine, for benchmarks.

:class:`Namespaces` gives every process a network namespace of its own and joins neighbours by a veth pair
with a token bucket (``tc tbf``) at both ends: real TCP over a real queue. :class:`Homes` gives processes
that all talk to each other one access link each, shaped in the same way. Both need root, ``ip``, ``tc``,
``unshare`` and ``nsenter`` (Debian: ``apt-get install iproute2 util-linux``). :class:`Relays` needs nothing:
neighbours talk through a relay in this process with a limit of bytes per second.

The namespaces have no names: they exist as long as the processes in them, so nothing is left behind, even if
they are killed.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol, Self

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_TO_LOWER, _TO_UPPER = "to-lower", "to-upper"
_ACCESS = "access"
_LIMIT_TRIAL = "ip link set lo up && tc qdisc add dev lo root tbf rate 10mbit burst 32kb latency 50ms"
_SWITCH_TRIAL = "ip link add name switch type bridge"
_BURST_SECONDS = 0.002
_LEAST_BURST = 4000.0  # two full Ethernet frames, and some
_READ_BYTES = 16384

CONGESTION_CONTROL = "cubic"
"""Of TCP on shaped links, as homes have it, whatever this machine uses: BBR does not fill short queues."""

FRAME_SHARE = 1448 / 1514
"""Share of TCP's data in the bytes that tbf counts: it counts whole Ethernet frames."""


class Shaper(Protocol):
    """The links of one chain: link i joins process i (its upper end) to process i + 1."""

    payload_share: float
    """Share of the shaped bandwidth that is left for the data of TCP."""

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that starts a process of the chain."""

    async def join(self, pids: Sequence[int], ports: Sequence[int]) -> list[str]:
        """Connect the processes `pids`; process i + 1 listens on `ports[i]`.

        Returns the ``host:port`` that process i dials, one for every link.
        """

    async def shape(self, bits_per_second: float) -> None:
        """Limit every link in each direction; infinity removes the limit."""

    async def close(self) -> None: ...


class Namespaces:
    """Links of veth pairs between network namespaces, shaped by tbf on what each end sends.

    Every method raises RuntimeError with the message of the tool that failed.
    """

    payload_share = FRAME_SHARE

    def __init__(self) -> None:
        self._pids: list[int] = []

    @staticmethod
    def missing() -> str:
        """Why namespaces are not possible here; "" if they are."""
        return _why_not(_LIMIT_TRIAL)

    def command(self, command: Sequence[str]) -> list[str]:
        return ["unshare", "--net", "--", *command]

    async def join(self, pids: Sequence[int], ports: Sequence[int]) -> list[str]:
        self._pids = list(pids)
        for pid in pids:
            await _inside(pid, "ip", "link", "set", "lo", "up")
        for link, port in enumerate(ports):
            upper, lower = pids[link], pids[link + 1]
            ends = f"link add name {_TO_LOWER} netns {upper} type veth peer name {_TO_UPPER} netns {lower}"
            await _run("ip", *ends.split())
            for pid, device, host in ((upper, _TO_LOWER, 1), (lower, _TO_UPPER, 2)):
                await _inside(pid, "ip", "address", "add", f"10.77.{link}.{host}/30", "dev", device)
                await _inside(pid, "ip", "link", "set", device, "up")
                await _choose_congestion_control(pid, device, f"10.77.{link}.0/30")
            assert port, "a process of the chain does not listen"
        return [f"10.77.{link}.2:{port}" for link, port in enumerate(ports)]

    async def shape(self, bits_per_second: float) -> None:
        for position, pid in enumerate(self._pids):
            for device, exists in ((_TO_LOWER, position < len(self._pids) - 1), (_TO_UPPER, position > 0)):
                if exists:
                    await _limit(pid, device, bits_per_second)

    async def close(self) -> None:
        self._pids = []


class Homes:
    """Network namespaces, each with its own access link; all access links end at one switch.

    Sent data is shaped at the home's end of the link, received data at the switch. Use :meth:`open`. Every
    method raises RuntimeError with the message of the tool that failed.

    Attributes:
        addresses: of the homes.
    """

    def __init__(self, pids: Sequence[int], switch: int) -> None:
        self._pids, self._switch = pids, switch
        self.addresses = tuple(f"10.78.0.{home + 1}" for home in range(len(pids)))

    @staticmethod
    def missing() -> str:
        """Why homes are not possible here; "" if they are."""
        return Namespaces.missing() or _why_not(_SWITCH_TRIAL)

    @classmethod
    @asynccontextmanager
    async def open(cls, count: int) -> AsyncIterator[Self]:
        """`count` homes, at most 250. They disappear at the end of the block, or with this process."""
        async with AsyncExitStack() as stack:
            pids = [await stack.enter_async_context(_namespace()) for _ in range(count + 1)]
            homes = cls(pids[:-1], pids[-1])
            await homes._join()
            yield homes

    def command(self, home: int, command: Sequence[str]) -> list[str]:
        """The command that starts a process in `home`."""
        return ["nsenter", f"--net=/proc/{self._pids[home]}/ns/net", "--", *command]

    async def shape(
        self, bits_per_second: float, homes: Sequence[int] | None = None, downlink: float = 0.0
    ) -> None:
        """Limit the access links of `homes` (default: all) in each direction; infinity removes the limit.

        `downlink`: bits per second that they receive, if these are others than they send.
        """
        for home in range(len(self._pids)) if homes is None else homes:
            await _limit(self._pids[home], _ACCESS, bits_per_second)
            await _limit(self._switch, f"home-{home}", downlink or bits_per_second)

    async def _join(self) -> None:
        switch = self._switch
        for command in (_SWITCH_TRIAL, "ip link set switch up", "ip link set lo up"):
            await _inside(switch, *command.split())
        for home, (pid, address) in enumerate(zip(self._pids, self.addresses, strict=True)):
            port = f"home-{home}"
            ends = f"link add name {_ACCESS} netns {pid} type veth peer name {port} netns {switch}"
            await _run("ip", *ends.split())
            for command in (f"ip link set {port} master switch", f"ip link set {port} up"):
                await _inside(switch, *command.split())
            for command in (
                "ip link set lo up",
                f"ip address add {address}/24 dev {_ACCESS}",
                f"ip link set {_ACCESS} up",
            ):
                await _inside(pid, *command.split())
            await _choose_congestion_control(pid, _ACCESS, "10.78.0.0/24")


@asynccontextmanager
async def _namespace() -> AsyncIterator[int]:
    """A process that does nothing but hold a network namespace; it ends with this one."""
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--net", "--", "sh", "-c", "echo; exec cat"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdout.readline()  # from here on it is in its namespace
        yield process.pid
    finally:
        process.stdin.close()
        await process.wait()


def _why_not(trial: str) -> str:
    """Why the commands `trial` fail in a network namespace of their own; "" where they do not."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found: apt-get install iproute2 util-linux"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", trial], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip().replace("\n", "; ") if tried.returncode else ""


async def _limit(pid: int, device: str, bits_per_second: float) -> None:
    """Limit what `device` in the namespace of `pid` sends; infinity removes the limit."""
    if math.isinf(bits_per_second):
        with suppress(RuntimeError):  # there was no limit
            await _inside(pid, "tc", "qdisc", "del", "dev", device, "root")
        return
    # An idle link passes a full bucket at once, so the bucket must be small against a message.
    burst = max(_LEAST_BURST, bits_per_second / 8 * _BURST_SECONDS)
    limit = f"rate {bits_per_second:.0f}bit burst {burst:.0f}b latency 50ms"
    await _inside(pid, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit.split())


async def _choose_congestion_control(pid: int, device: str, network: str) -> None:
    # By the route: the setting of a namespace takes only what unprivileged users may choose.
    route = f"ip route change {network} dev {device} congctl {CONGESTION_CONTROL}"
    await _inside(pid, *route.split())


async def _inside(pid: int, *command: str) -> None:
    await _run("nsenter", f"--net=/proc/{pid}/ns/net", *command)


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, message = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {message.decode().strip()}")


class Relays:
    """Links through relays on the loopback, in this process.

    Args:
        delay: seconds that every byte takes in addition, one way.
    """

    payload_share = 1.0

    def __init__(self, delay: float = 0.0) -> None:
        self._delay, self._rate = delay, math.inf
        self._servers: list[asyncio.Server] = []
        self._carrying: set[asyncio.Task[None]] = set()

    def command(self, command: Sequence[str]) -> list[str]:
        return list(command)

    async def join(self, pids: Sequence[int], ports: Sequence[int]) -> list[str]:
        endpoints = []
        for port in ports:

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port, limit=_READ_BYTES)
                for source, target in ((reader, far_writer), (far_reader, writer)):
                    task = asyncio.create_task(self._carry(source, target))
                    self._carrying.add(task)
                    task.add_done_callback(self._carrying.discard)

            server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_READ_BYTES)
            self._servers.append(server)
            endpoints.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return endpoints

    async def shape(self, bits_per_second: float) -> None:
        self._rate = bits_per_second / 8

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        deliver = asyncio.create_task(self._deliver(on_the_way, target))
        free = 0.0
        try:
            while data := await source.read(_READ_BYTES):
                # A timer may fire late; a small burst compensates, so that the link keeps its rate.
                free = max(free, time.monotonic() - _BURST_SECONDS) + len(data) / self._rate
                await asyncio.sleep(free - time.monotonic())
                on_the_way.put_nowait((time.monotonic() + self._delay, data))
        except ConnectionError:
            pass
        finally:
            on_the_way.put_nowait((0.0, b""))
            await deliver

    @staticmethod
    async def _deliver(on_the_way: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                due, data = await on_the_way.get()
                if not data:
                    break
                await asyncio.sleep(due - time.monotonic())
                target.write(data)
                await target.drain()
        target.close()
