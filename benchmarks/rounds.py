"""The cost of a round of payloads over shaped links: bytes on the sockets, and seconds.

    python -m benchmarks.rounds           # 2 and 4 replicas, some minutes
    python -m benchmarks.rounds --quick   # 2 replicas, a few cases, below 90 s

Every replica is a process with the production hivemind host, real p2pd and averagers. The replicas exchange
payloads of the codec's sizes as nodes do, in exchange groups as from a coordinator. Each has its own access
link, shaped in both directions (benchmarks.shaping.Homes). Without namespaces (they need root and Linux) they
use the loopback, and links are unshaped.

Bytes are those that TCP counts for p2pd's connections (TCP_INFO: acknowledged, and received). They include
encryption, multiplexing, remote calls, signed descriptors and the DHT's traffic in the same time, but not the
headers of TCP and IP.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ask, end_processes, pems_of, start_process
from benchmarks.shaping import CONGESTION_CONTROL, FRAME_SHARE, Homes
from benchmarks.tables import NotHere, Table
from node.views.plan import payload_bytes
from protocol.math.payload_layout import PayloadLayout
from protocol.run_files.resolve import resolve
from protocol.types import MemberLine
from tests.support.certificates import credentials

_ROUND_SECONDS = 120.0
_SETTLE_SECONDS = 0.1
_PUBLISHED = 5
_TEN_MILLION = (2500, 4000)

_PID = re.compile(r"pid=(\d+)")
_ACKED, _RECEIVED = re.compile(r"bytes_acked:(\d+)"), re.compile(r"bytes_received:(\d+)")


@dataclass(frozen=True)
class Case:
    """One row: `sizes` of a replica's payloads, one for each stage; `bandwidth` in bits per second."""

    name: str
    sizes: tuple[int, ...]
    bandwidth: float


@dataclass(frozen=True)
class Result:
    """One round of a case: `socket_bytes` that one replica sends and receives, and `seconds` until all
    replicas have all payloads."""

    case: Case
    replicas: int
    socket_bytes: float
    seconds: float

    @property
    def codec_bytes(self) -> int:
        """The payloads that one replica sends to and receives from all others."""
        return 2 * (self.replicas - 1) * sum(self.case.sizes)

    @property
    def overhead(self) -> float:
        """Bytes on the sockets beyond the payloads, as a share of the payloads."""
        return self.socket_bytes / self.codec_bytes - 1

    @property
    def ideal_seconds(self) -> float:
        """Payload bytes in one direction / bandwidth without the headers of Ethernet, IP and TCP."""
        return self.codec_bytes / 2 * 8 / (self.case.bandwidth * FRAME_SHARE)


@dataclass(frozen=True)
class Loopback:
    """Replaces :class:`Homes`: all replicas have the same address, and links are unshaped."""

    addresses: tuple[str, ...]

    def command(self, home: int, command: Sequence[str]) -> list[str]:
        return list(command)

    async def shape(self, bits_per_second: float) -> None:
        if not math.isinf(bits_per_second):
            raise RuntimeError("links on the loopback cannot be shaped")


def tcp_bytes(listing: str, pids: Collection[int]) -> int:
    """Bytes sent and received so far by the connections of `pids`, in what ``ss -tinpHO`` prints."""
    total = 0
    for line in listing.splitlines():
        if pids.isdisjoint(map(int, _PID.findall(line))):
            continue
        for counter in (_ACKED, _RECEIVED):
            found = counter.search(line)  # absent while it is 0
            total += int(found[1]) if found else 0
    return total


class Peers:
    """The replicas' processes."""

    def __init__(
        self, homes: Homes | Loopback, processes: Sequence[asyncio.subprocess.Process], stages: int
    ) -> None:
        self._homes, self._processes, self._stages = homes, processes, stages
        self._p2pd: list[int] = []
        self._round = 0

    async def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send `command` to every peer at the same time. Returns their answers."""
        return await asyncio.gather(*(ask(process, command) for process in self._processes))

    async def start(self, capacity: int, reduced: str = "") -> None:
        """Connect the peers by a DHT. Each hosts all stages. `reduced`: as for RoundMember.host."""
        names = [each["peer"] for each in await self.ask({"do": "introduce"})]
        known: list[str] = []
        for name, address, process in zip(names, self._homes.addresses, self._processes, strict=True):
            start = {"do": "start", "address": address, "initial_peers": known}
            started = await ask(process, {**start, "shown": pems_of(credentials(name))})
            known = known or started["addresses"]
            self._p2pd.append(started["p2pd"])
        hosted = {"capacity": capacity, "stages": self._stages, "reduced": reduced}
        await self.ask({"do": "host", "peers": names, **hosted})

    async def run_round(self, sizes: Sequence[int], lines: Sequence[MemberLine] = ()) -> tuple[float, float]:
        """One round of payloads of `sizes`: bytes on a replica's sockets, and seconds.

        `lines` of the replicas determine the helpers; without lines there are none. Raises RuntimeError if a
        peer lacks a payload.
        """
        self._round += 1
        proposed = await self.ask({"do": "propose", "round_number": self._round, "sizes": sizes})
        groups = list(zip(*(each["descriptors"] for each in proposed), strict=True))
        told = [asdict(line) for line in lines]
        before = await self._settled_bytes()
        done = await self.ask({"do": "exchange", "groups": groups, "lines": told, "seconds": _ROUND_SECONDS})
        if any(each["held"] < len(self._processes) * len(sizes) for each in done):
            raise RuntimeError(f"a round was not complete within {_ROUND_SECONDS:.0f} s")
        seconds = max(each["ended"] for each in done) - min(each["began"] for each in done)
        return (await self._settled_bytes() - before) / len(self._processes), seconds

    async def published_bytes(self) -> float:
        """Bytes on a replica's sockets for one record that each of them publishes in the DHT."""
        await self.ask({"do": "publish"})
        before = await self._settled_bytes()
        for _ in range(_PUBLISHED):
            await self.ask({"do": "publish"})
        return (await self._settled_bytes() - before) / len(self._processes) / _PUBLISHED

    async def _settled_bytes(self) -> int:
        """The bytes of all peers, when they stop growing: acknowledgements come late."""
        last, now = -1, await self._bytes()
        while now != last:
            await asyncio.sleep(_SETTLE_SECONDS)
            last, now = now, await self._bytes()
        return now

    async def _bytes(self) -> int:
        total = 0
        for home, pid in enumerate(self._p2pd):
            listing = await asyncio.create_subprocess_exec(
                *self._homes.command(home, ["ss", "-tinpHO"]), stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await listing.communicate()
            total += tcp_bytes(printed.decode(), {pid})
        return total


@asynccontextmanager
async def peers_at(
    homes: Homes | Loopback, stages: int, capacity: int, reduced: str = ""
) -> AsyncIterator[Peers]:
    """Start one replica in each home, and connect them. `reduced`: as for RoundMember.host."""
    folder = Path(tempfile.mkdtemp(prefix="r-"))
    processes = []
    try:
        for home in range(len(homes.addresses)):
            member = [sys.executable, "-m", "benchmarks.round_member", str(folder / str(home))]
            processes.append(await start_process(homes.command(home, member), TMPDIR=str(folder)))
        peers = Peers(homes, processes, stages)
        await peers.start(capacity, reduced)
        yield peers
    finally:
        await end_processes(processes)
        shutil.rmtree(folder, ignore_errors=True)


async def measure(
    cases: Sequence[Case], replicas: int, rounds: int, missing: str
) -> tuple[list[Result], float]:
    """Every case, and the bytes of one record in the DHT.

    Args:
        rounds: measured for each case, after one round that opens connections.
        missing: why links cannot be shaped; "" if they can.
    """
    stages = max(len(case.sizes) for case in cases)
    capacity = max(max(case.sizes) for case in cases)
    async with AsyncExitStack() as stack:
        homes: Homes | Loopback = Loopback(("127.0.0.1",) * replicas)
        if not missing:
            homes = await stack.enter_async_context(Homes.open(replicas))
        peers = await stack.enter_async_context(peers_at(homes, stages, capacity))
        results = []
        for case in cases:
            await homes.shape(case.bandwidth)
            measured = [await peers.run_round(case.sizes) for _ in range(1 + rounds)][1:]
            nbytes, seconds = zip(*measured, strict=True)
            results.append(Result(case, replicas, statistics.mean(nbytes), statistics.median(seconds)))
        await homes.shape(math.inf)
        return results, await peers.published_bytes()


def cases_of(quick: bool, missing: str) -> list[Case]:
    """The payloads, in the presets' codec, of a stage of 10 million parameters, and of whole presets."""
    outer = resolve("178m").outer
    payloads = {
        "10M parameters, 1 stage": (PayloadLayout({"matrix": _TEN_MILLION}, outer).nbytes,),
        "178m, 3 stages": tuple(payload_bytes(resolve("178m", overrides={"swarm.stages": 3}))),
    }
    if not quick:
        payloads["1b, 4 stages"] = tuple(payload_bytes(resolve("1b")))
    megabits = [0.0] if missing else ([0.0, 10.0, 100.0] if quick else [0.0, 10.0, 20.0, 50.0, 100.0])
    return [
        Case(name, sizes, 1e6 * rate or math.inf) for name, sizes in payloads.items() for rate in megabits
    ]


def rows_of(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, row by row."""
    for each in results:
        shaped = not math.isinf(each.case.bandwidth)
        yield (
            each.case.name,
            str(each.replicas),
            f"{each.case.bandwidth / 1e6:.0f} Mb/s" if shaped else "unshaped",
            f"{each.codec_bytes / 1e3:,.1f}",
            f"{each.socket_bytes / 1e3:,.1f}",
            f"{100 * each.overhead:.2f} %",
            f"{each.ideal_seconds:.2f}" if shaped else "",
            f"{each.seconds:.2f}",
            f"{each.seconds / each.ideal_seconds:.2f}" if shaped else "",
        )


def notes_of(results: Sequence[Result], published: Mapping[int, float], missing: str) -> tuple[str, ...]:
    """How to read the table."""
    most = max(each.overhead for each in results)
    records = " and ".join(f"{nbytes:,.0f} ({replicas} replicas)" for replicas, nbytes in published.items())
    notes = [
        "Payload kB: what one replica sends to and receives from all others, by the codec's figure. Socket "
        "kB: what its p2pd has sent and received over TCP in the same time, nothing subtracted: encryption, "
        "multiplexing, remote calls, signed descriptors, and whatever the DHT did. Headers of TCP and IP are "
        f"not in it. At most {100 * most:.2f} % more than the payloads.",
        "Bytes/bandwidth: the payloads in one direction over the shaped link, less what the headers of "
        "Ethernet, IP and TCP take of it. Round: from the first exchange call to when all replicas hold all "
        "payloads, verified and on the disk (median). What the coordinator does is not in it.",
        f"A record that is published in the DHT, every 5 minutes, takes {records} bytes of a replica's "
        "sockets, which is no part of a round.",
    ]
    if missing:
        notes.append(f"Left out, links of a chosen bandwidth: {missing}.")
    else:
        notes.append(
            "Every replica has a network namespace and an access link of its own, shaped in both directions "
            f"(tc tbf), without additional latency; TCP {CONGESTION_CONTROL}."
        )
    return tuple(notes)


def table(quick: bool) -> Table:
    """Measure. Raises NotHere if the system does not count the bytes of its sockets."""
    if shutil.which("ss") is None:
        raise NotHere("ss not found: apt-get install iproute2")
    missing = Homes.missing()
    cases = cases_of(quick, missing)
    results: list[Result] = []
    published = {}
    for replicas in (2,) if quick else (2, 4):
        measured, published[replicas] = asyncio.run(measure(cases, replicas, 3 if quick else 5, missing))
        results += measured
    return Table(
        "Rounds: bytes on the sockets, and time over shaped links",
        f"python -m benchmarks.rounds{' --quick' * quick}",
        (
            *("payloads", "replicas", "link", "payload kB", "socket kB", "more"),
            *("bytes/bandwidth s", "round s", "ratio"),
        ),
        tuple(rows_of(results)),
        notes_of(results, published, missing),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 replicas, a few cases")
    print(table(parser.parse_args().quick).markdown)


if __name__ == "__main__":
    main()
