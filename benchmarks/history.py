"""The history of long runs of many peers: seconds of each query, bytes on disk, what writing costs.

    python -m benchmarks.history           # 1,000 peers x 200 rounds
    python -m benchmarks.history --peers 200 --rounds 10000

All rows come from events and measurements through the same code as in a coordinator. Peers are pipelines of
two; now and then one is lost, joins again, and another plan follows.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.history_events import LOSS_EVERY, STAGES, peer_id, spec_of, story
from benchmarks.tables import Table, machine
from coordinator.run.state.apply import apply
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from coordinator.store.history_answers import CreditOrder, Page
from coordinator.store.history_file import HISTORY_FILE, HistoryFile
from coordinator.store.history_fold import changes_of, changes_of_measurement

REPEATS = 3
SHAPE, QUICK = (1000, 200), (200, 40)
"""Peers and rounds."""


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


def fill(path: Path, peers: int, rounds: int) -> float:
    """Write a history of `rounds` rounds.

    Returns the mean seconds of the writer for a round, without those that make its events and states.
    """
    spec, sequence, seconds = spec_of(rounds), 0, 0.0
    state = State(spec, "benchmark")
    with HistoryFile(path, spec, "benchmark") as file:
        for found, measured in story(peers, rounds):
            steps = []
            for event in found:
                before, state = state, apply(state, event)
                steps.append((event, before, state))
            began = time.perf_counter()
            changes = []
            for step in steps:
                sequence += 1
                changes.append(tuple(changes_of(sequence, *step)))
            changes += [tuple(changes_of_measurement(*each)) for each in measured]
            file.write(changes, sequence, found[-1].at, 1)
            seconds += time.perf_counter() - began if measured else 0.0
    return seconds / rounds


def queries(history: SqliteHistory, peers: int, rounds: int) -> dict[str, Callable[[], object]]:
    """What pages ask for, by name: the largest and the most distant parts."""
    middle, peer = rounds // 2, peer_id(peers // 2)
    last_page = Page(skip=max(0, peers - 100), most=100)
    return {
        "replicas": history.replicas,
        "losses": history.losses,
        "losses of a replica": lambda: history.losses(peers // STAGES - 1),
        "speed": history.speed,
        "traffic": history.traffic,
        "rounds": lambda: history.rounds(before=middle),
        "a round": lambda: history.round(middle),
        "a peer": lambda: history.peer(peer),
        "credits": lambda: history.credits(CreditOrder.LINK, last_page),
        "all credits": lambda: history.credits(CreditOrder.NAME, Page(most=1000)),
    }


def measure(folder: Path, peers: int, rounds: int) -> Figures:
    path = folder / HISTORY_FILE
    write_seconds = fill(path, peers, rounds)
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
        return table_of(measure(Path(folder), *shape), quick)


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
    parser.add_argument("--peers", type=int, default=SHAPE[0])
    parser.add_argument("--rounds", type=int, default=SHAPE[1])
    parser.add_argument("--folder", type=Path, default=None, help="where the files are while this runs")
    arguments = parser.parse_args()
    peers, rounds = QUICK if arguments.quick else (arguments.peers, arguments.rounds)
    print(machine())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(table_of(measure(Path(folder), peers, rounds), arguments.quick).markdown)


if __name__ == "__main__":
    main()
