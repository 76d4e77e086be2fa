"""The history of long runs of many peers: seconds of each query, bytes on disk, what writing costs.

    python -m benchmarks.history           # 1,000 peers x 10,000 rounds: ten minutes, and 2.4 GB
    python -m benchmarks.history --quick   # 200 peers x 500 rounds, below a minute
    python -m benchmarks.history --pages --folder DIR    # also each page of the real dashboard

The rows of the first rounds come from events and measurements through the same code as in a coordinator; the
others are their copies (benchmarks.history_copies), unless `--block` is the number of rounds. Peers are
pipelines of two; now and then one is lost, joins again, and another plan follows.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import history_pages
from benchmarks.history_copies import Block, multiply
from benchmarks.history_events import LOSS_EVERY, STAGES, peer_id, spec_of, story
from benchmarks.tables import Table, machine
from coordinator.history.peer_records import CreditOrder
from coordinator.history.records import Page
from coordinator.history.row_builder import RowBuilder
from coordinator.history.rows import milliseconds
from coordinator.storage.history import SqliteHistory
from coordinator.storage.history_database import HistoryDatabase
from coordinator.storage.history_schema import HISTORY_FILE

REPEATS = 3
SHAPE, QUICK = (1000, 10_000), (200, 500)
"""Peers and rounds."""
BLOCK = 100
"""Rounds that go through the writer."""


@dataclass(frozen=True)
class Figures:
    """Of one shape. Times in seconds; `memory` is what the process holds at most, in bytes."""

    peers: int
    rounds: int
    write_seconds: float
    nbytes: int
    slowest: str
    query_seconds: dict[str, float]
    memory: int


def fill(path: Path, peers: int, rounds: int, block: int) -> float:
    """Write a history of `rounds` rounds: the first `block` go through the writer, the others are copies.

    Returns the mean seconds of the writer for a round, without those that make its events.
    """
    spec, sequence, seconds = spec_of(rounds), 0, 0.0
    builder, first_sequence = RowBuilder(spec), 0
    with HistoryDatabase(path, spec, "benchmark") as database:
        for found, measured in story(peers, block):
            rows, began = [], time.perf_counter()
            for event in found:
                sequence += 1
                rows += builder.of_event(sequence, event)
            for each in measured:
                rows += builder.of_measurement(*each)
            database.write(rows, sequence, milliseconds(found[-1].at), 1)
            seconds += time.perf_counter() - began if measured else 0.0
            first_sequence = first_sequence or sequence
    if rounds > block:
        plans = block // LOSS_EVERY
        multiply(
            path,
            Block(block, first_sequence, sequence - first_sequence, plans, 60.0 * block),
            rounds // block,
        )
    return seconds / block


def queries(history: SqliteHistory, peers: int, rounds: int) -> dict[str, Callable[[], object]]:
    """What pages ask for, by name: the largest and the most distant parts."""
    middle, peer = rounds // 2, peer_id(peers // 2)
    last_page = Page(skip=max(0, peers - 100), most=100)
    return {
        "summary": history.summary,
        "replicas": lambda: history.replicas(Page(most=1000)),
        "losses": history.losses,
        "losses of a replica": lambda: history.losses(peers // STAGES - 1),
        "speed": history.speed,
        "traffic": history.traffic,
        "traffic of a replica": lambda: history.traffic(0),
        "traffic of a link": lambda: history.traffic(0, 0),
        "members of a round": lambda: history.members(middle),
        "rounds": lambda: history.rounds(before=middle),
        "a round": lambda: history.round(middle),
        "peers": lambda: history.peers(last_page),
        "a peer": lambda: history.peer(peer),
        "credits": lambda: history.credits(CreditOrder.LINK, last_page),
        "all credits": lambda: history.credits(CreditOrder.NAME, Page(most=1000)),
        "plans": history.plans,
        "a plan": lambda: history.plan(1 + (rounds - 1) // LOSS_EVERY),
    }


def measure(folder: Path, peers: int, rounds: int, block: int) -> Figures:
    path = folder / HISTORY_FILE
    write_seconds = fill(path, peers, rounds, block)
    history, slowest = SqliteHistory(path), dict[str, float]()
    for _ in range(REPEATS):
        for name, query in queries(history, peers, rounds).items():
            began = time.perf_counter()
            assert query()
            slowest[name] = max(slowest.get(name, 0.0), time.perf_counter() - began)
    return Figures(
        peers,
        rounds,
        write_seconds,
        path.stat().st_size,
        max(slowest, key=lambda name: slowest[name]),
        slowest,
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def table(quick: bool) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        shape = QUICK if quick else SHAPE
        return table_of(measure(Path(folder), *shape, min(BLOCK, shape[1])), quick)


def table_of(each: Figures, quick: bool) -> Table:
    row = (
        f"{each.peers:,}",
        f"{each.rounds:,}",
        f"{1000 * each.query_seconds[each.slowest]:.0f}",
        each.slowest,
        f"{1000 * each.write_seconds:.0f}",
        f"{each.nbytes / 2**20:,.0f}",
        f"{each.nbytes / each.peers / each.rounds:.0f}",
        f"{each.memory / 2**20:,.0f}",
    )
    queries_ms = ", ".join(f"{name} {1000 * time:.0f}" for name, time in each.query_seconds.items())
    return Table(
        "History of a run: queries of pages, and the writer",
        "python -m benchmarks.history" + (" --quick" if quick else ""),
        (
            "peers",
            "rounds",
            "slowest query, ms",
            "which",
            "write a round, ms",
            "file, MiB",
            "bytes per peer and round",
            "process, MiB",
        ),
        (row,),
        (
            f"Pipelines of {STAGES}; every {LOSS_EVERY} rounds a peer is lost and another plan follows. The "
            f"slowest of {REPEATS} calls of each query counts; each opens the file anew.",
            "The process also makes the events: its memory is more than that of the writer.",
            f"Each query, in ms: {queries_ms}.",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pages", action="store_true", help="also ask for each page of the dashboard")
    parser.add_argument("--peers", type=int, default=SHAPE[0])
    parser.add_argument("--rounds", type=int, default=SHAPE[1])
    parser.add_argument("--block", type=int, default=BLOCK, help="rounds that go through the writer")
    parser.add_argument("--folder", type=Path, default=None, help="where the files are while this runs")
    arguments = parser.parse_args()
    peers, rounds = QUICK if arguments.quick else (arguments.peers, arguments.rounds)
    block = min(arguments.block, rounds)
    if block % LOSS_EVERY or rounds % block:
        parser.error(f"--rounds must be a multiple of --block, and that of {LOSS_EVERY}")
    print(machine())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(table_of(measure(Path(folder), peers, rounds, block), arguments.quick).markdown)
        if arguments.pages:
            print(history_pages.measure(Path(folder), peers, rounds).table.markdown)


if __name__ == "__main__":
    main()
