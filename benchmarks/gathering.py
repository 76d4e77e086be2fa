"""The time in which replicas with unequal lines gather their payloads, with helpers and without.

    python -m benchmarks.gathering           # 2, 4 and 8 replicas, some minutes
    python -m benchmarks.gathering --quick   # 4 replicas
    python -m benchmarks.gathering --equal   # equal lines, at which nobody helps: 2, 4, 8 and 16 replicas

As :mod:`benchmarks.rounds`, with one payload per replica and lines of two kinds: homes, which receive four
times as fast as they send, and strong replicas. Needs network namespaces. Every case is measured twice: with
the lines of the members in the group, as the coordinator tells them, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.rounds import peers_at
from benchmarks.shaping import CONGESTION_CONTROL, FRAME_SHARE, Homes
from benchmarks.tables import NotHere, Table
from protocol.types import MemberLine
from tests.support.gathering import least_seconds

_PAYLOAD = 4_000_000
_DOWNLINK = 4
"""Times the uplink of a home."""
_EQUAL = 10e6
_EASY_REPLICAS = 8
_EQUAL_SECONDS = 5.0
"""Equal lines: bits per second of up to so many replicas, of more in proportion less, since all of them
share this machine's cores; and the seconds in which such a line carries the payloads of all others."""


@dataclass(frozen=True)
class Case:
    """Replicas of which every `every`-th one is strong; 0 for none. Uplinks in bits per second."""

    home: float
    strong: float = 0.0
    every: int = 0

    def is_strong(self, replica: int) -> bool:
        return bool(self.every) and replica % self.every == self.every - 1

    def line(self, replica: int) -> MemberLine:
        """What TCP can send and receive."""
        up = self.strong if self.is_strong(replica) else self.home
        down = up if self.is_strong(replica) else _DOWNLINK * up
        return MemberLine(round(up / 8 * FRAME_SHARE), round(down / 8 * FRAME_SHARE), True)

    @property
    def name(self) -> str:
        homes = f"{self.home / 1e6:.0f} / {_DOWNLINK * self.home / 1e6:.0f} Mb/s"
        return f"{homes}, every {self.every}. {self.strong / 1e6:.0f} Mb/s" if self.every else homes


@dataclass(frozen=True)
class Result:
    """Seconds of a round: at least possible, without helpers, with helpers."""

    case: Case
    replicas: int
    least: float
    without: float
    helped: float


CASES = (Case(10e6), Case(10e6, 100e6, 4), Case(10e6, 100e6, 2))


async def measure(cases: Sequence[Case], replicas: int, rounds: int) -> list[Result]:
    """Every case, the median of `rounds` after one that opens connections."""
    async with AsyncExitStack() as stack:
        homes = await stack.enter_async_context(Homes.open(replicas))
        peers = await stack.enter_async_context(peers_at(homes, 1, _PAYLOAD))
        results = []
        for case in cases:
            lines = [case.line(replica) for replica in range(replicas)]
            for replica in range(replicas):
                uplink = case.strong if case.is_strong(replica) else case.home
                downlink = uplink if case.is_strong(replica) else _DOWNLINK * uplink
                await homes.shape(uplink, [replica], downlink)
            found = []
            for told in ((), lines):
                seconds = [(await peers.run_round([_PAYLOAD], told))[1] for _ in range(1 + rounds)]
                found.append(statistics.median(seconds[1:]))
            results.append(Result(case, replicas, least_seconds(lines, _PAYLOAD), *found))
        return results


def rows_of(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, row by row."""
    for each in results:
        times = (each.without, each.helped)
        yield (
            each.case.name,
            str(each.replicas),
            f"{each.least:.2f}",
            *(cell for seconds in times for cell in (f"{seconds:.2f}", f"{seconds / each.least:.2f}")),
        )


async def measure_equal(replicas: int, rounds: int) -> tuple[str, ...]:
    """The row of so many replicas whose lines carry the same in each direction."""
    bandwidth = _EQUAL * min(1.0, _EASY_REPLICAS / replicas)
    rate = bandwidth / 8 * FRAME_SHARE
    payload = round(_EQUAL_SECONDS * rate / (replicas - 1))
    async with Homes.open(replicas) as homes, peers_at(homes, 1, payload) as peers:
        await homes.shape(bandwidth)
        lines = [MemberLine(round(rate), round(rate), True)] * replicas
        seconds = [(await peers.run_round([payload], lines))[1] for _ in range(1 + rounds)][1:]
    ratios = sorted(each / _EQUAL_SECONDS for each in seconds)
    cells = (statistics.median(ratios), ratios[0], ratios[-1])
    return (
        *(str(replicas), f"{bandwidth / 1e6:.0f} Mb/s", f"{payload / 1e3:.0f}", f"{_EQUAL_SECONDS:.2f}"),
        *(f"{ratio:.2f}" for ratio in cells),
    )


def equal_table(quick: bool) -> Table:
    """Measure. Raises NotHere where links cannot be shaped."""
    if missing := Homes.missing():
        raise NotHere(missing)
    rounds = 1 if quick else 5
    sizes = (2, 4) if quick else (2, 4, 8, 16)
    return Table(
        "Gathering over equal lines",
        f"python -m benchmarks.gathering --equal{' --quick' * quick}",
        ("replicas", "line", "payload kB", "bytes/bandwidth s", "ratio", "least", "largest"),
        tuple(asyncio.run(measure_equal(replicas, rounds)) for replicas in sizes),
        (
            "Bytes/bandwidth: the payloads of all others over one uplink, less what the headers take. Ratio: "
            f"the time of a round to this, median, least and largest of {rounds}. TCP {CONGESTION_CONTROL}.",
        ),
    )


def table(quick: bool) -> Table:
    """Measure. Raises NotHere where links cannot be shaped."""
    if missing := Homes.missing():
        raise NotHere(missing)
    results: list[Result] = []
    for replicas in (4,) if quick else (2, 4, 8):
        results += asyncio.run(measure(CASES, replicas, 1 if quick else 3))
    return Table(
        "Gathering over unequal lines, with helpers and without",
        f"python -m benchmarks.gathering{' --quick' * quick}",
        ("uplink / downlink of the homes", "replicas", "least s", "without s", "ratio", "helped s", "ratio"),
        tuple(rows_of(results)),
        (
            f"One payload of {_PAYLOAD / 1e6:.0f} MB per replica. Least: the longest of own payload / "
            "uplink, payloads of the others / downlink, and all copies / sum of the uplinks, less what the "
            "headers of Ethernet, IP and TCP take. The others: as in the table of rounds (median).",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 replicas")
    parser.add_argument("--equal", action="store_true", help="equal lines; with --quick 2 and 4 replicas")
    options = parser.parse_args()
    print((equal_table if options.equal else table)(options.quick).markdown)


if __name__ == "__main__":
    main()
