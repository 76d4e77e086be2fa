"""A coordinator under load: its CPU, its memory, its log, and how fast it answers.

    python -m benchmarks.coordinator                                   # 100 peers, 5 rounds of 10 s
    python -m benchmarks.coordinator --peers 1000 --rounds 50 --seconds 30
    python -m benchmarks.coordinator --peers 1000 --rounds 50 --seconds 40 --gathering 10
    python -m benchmarks --only coordinator

A fifth of the peers are full replicas, the others pipelines of 4. The peers are scripted
(benchmarks.scripted_peers): they have connections with TLS and certificates of their own, and make the calls
of a node, but have no model. Two processes contain most of them, and are as busy as the coordinator when a
round ends, as no node is. So latencies are those of every 50th peer; these have a process of their own. All
processes share the cores of this machine. `--gathering` says over how many seconds the members of a group
report: those of a real swarm have lines that differ, and gather for minutes. The first round does not count:
it contains the start of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ask, end_processes, start_process
from benchmarks.tables import NotHere, Table, machine
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

STAGES = 4
PROCESSES = 2
OBSERVED = 50
"""One of so many peers is in the process whose latencies count."""
_GATHERING = 1.0
SHAPES = ((100, 10, 30.0, _GATHERING), (300, 10, 30.0, _GATHERING), (1000, 10, 30.0, _GATHERING))
"""Peers, rounds, seconds of a round, and over how many seconds members report."""
QUICK = ((100, 5, 10.0, _GATHERING),)
_EXCHANGE_SECONDS = 3.0
"""What a round takes beside its inner phase and the gathering."""
_SHOWN = 6
_ROW_HASH_BYTES = 32


@dataclass(frozen=True)
class Figures:
    """Of one shape.

    Attributes:
        seconds: of the rounds that count.
        cpu: seconds of CPU of the coordinator in this time.
        memory: the most bytes that the coordinator had.
        latencies: by kind of call, its answers by milliseconds.
        log: by kind of event, how many there are in a round and the bytes of their rows.
        watched: bytes of the updates that all peers have received in the whole run.
    """

    peers: int
    rounds: int
    seconds: float
    cpu: float
    memory: float
    latencies: dict[str, Counter[int]]
    log: dict[str, tuple[float, float]]
    watched: float

    @property
    def log_bytes(self) -> float:
        return sum(nbytes for _, nbytes in self.log.values())

    @property
    def log_events(self) -> float:
        return sum(count for count, _ in self.log.values())


def spec_of(peers: int, rounds: int) -> RunSpec:
    full = max(1, peers // 5)
    overrides = {
        "rounds": rounds,
        "swarm.stages": STAGES,
        "swarm.replicas": full,
        "swarm.pipelines": (peers - full) // STAGES,
        "model.layers": 4 * STAGES,  # so that a pipeline is faster with one member for each stage
    }
    return resolve("nano", overrides=overrides)


def peers_of(spec: RunSpec) -> int:
    return spec.swarm.replicas + spec.swarm.pipelines * STAGES


def percentile(found: Counter[int], share: float) -> int:
    """The least number of milliseconds within which this share of the answers came."""
    wanted, reached = share * found.total(), 0
    for milliseconds in sorted(found):
        reached += found[milliseconds]
        if reached >= wanted:
            return milliseconds
    return 0


def latencies_of(paths: Sequence[Path]) -> dict[str, Counter[int]]:
    """Of the first process of peers, by what all of them have written. See scripted_peers.Latencies."""
    parts = [json.loads(path.read_text()) for path in paths]
    observed = parts[0]
    found = {
        kind: Counter({int(milliseconds): count for milliseconds, count in counts.items()})
        for kind, counts in observed["plain"].items()
    }
    for key in {key for part in parts for key in part["asked"]}:
        kind, _, round_number = key.split()
        if int(round_number) == 1:
            continue
        last = max(part["asked"].get(key, 0.0) for part in parts)
        answers = observed["answered"].get(key, ())
        # An answer before the last call was due for another reason: the deadline had passed.
        found.setdefault(kind, Counter()).update(round(1000 * max(0.0, at - last)) for at in answers)
    return found


def log_of(folder: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """By kind of event, how many a round has, and the bytes of their rows: of the second round and later."""
    counts, nbytes = Counter[str](), Counter[str]()
    decided = "SELECT sequence FROM events WHERE kind IN ('RoundCommitted', 'RoundAborted') ORDER BY sequence"
    query = "SELECT kind, length(CAST(body AS BLOB)) FROM events WHERE sequence > ? AND sequence <= ?"
    with closing(sqlite3.connect(folder / "coordinator.sqlite")) as db:
        ends = [sequence for (sequence,) in db.execute(decided)][STAGES - 1 :: STAGES]
        for kind, length in db.execute(query, (ends[0], ends[-1])):
            counts[kind] += 1
            nbytes[kind] += length + len(kind) + _ROW_HASH_BYTES
    later = rounds - 1
    return {kind: (count / later, nbytes[kind] / later) for kind, count in counts.items()}


async def measure(
    folder: Path, peers: int, rounds: int, seconds: float, gathering: float = _GATHERING
) -> Figures:
    """A run of `peers` peers and `rounds` rounds; a round takes about `seconds`."""
    spec, run_folder = spec_of(peers, rounds), folder / "run"
    server = await start_process([sys.executable, "-m", "benchmarks.loaded_coordinator"])
    crowds = [
        await start_process([sys.executable, "-m", "benchmarks.scripted_peers"]) for _ in range(1 + PROCESSES)
    ]
    paths = [folder / f"{i}.json" for i in range(1 + PROCESSES)]

    async def ask_all(**command: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(ask(crowd, command) for crowd in crowds))

    try:
        phase = max(1.0, seconds - gathering - _EXCHANGE_SECONDS)
        await _start(server, crowds, spec, run_folder, phase, gathering)
        await ask_all(do="until_round", round_number=1)
        before, began = await ask(server, {"do": "figures"}), time.monotonic()
        await ask_all(do="until_round", round_number=rounds)
        after, ended = await ask(server, {"do": "figures"}), time.monotonic()
        results = await asyncio.gather(
            *(
                ask(crowd, {"do": "results", "path": str(path)})
                for crowd, path in zip(crowds, paths, strict=True)
            )
        )
        await ask(server, {"do": "until_over"})
    finally:
        await end_processes([server, *crowds])
    return Figures(
        peers=peers_of(spec),
        rounds=rounds,
        seconds=ended - began,
        cpu=after["cpu"] - before["cpu"],
        memory=after["memory"],
        latencies=latencies_of(paths),
        log=log_of(run_folder, rounds),
        watched=sum(each["watched"] for each in results),
    )


async def _start(
    server: Process, crowds: Sequence[Process], spec: RunSpec, folder: Path, phase: float, gathering: float
) -> None:
    """Start the coordinator, and join with all peers."""
    started = await ask(server, {"do": "start", "spec_json": spec.canonical_json, "folder": str(folder)})
    command = {
        "do": "join",
        "spec_json": spec.canonical_json,
        "folder": str(folder),
        "address": started["address"],
        "phase": phase,
        "gathering": gathering,
    }
    full, total = spec.swarm.replicas, peers_of(spec)
    both = range(full), range(full, total)
    observed = {name: [*each[::OBSERVED]] for name, each in zip(("full", "stage"), both, strict=True)}
    rest = [[number for number in each if (number - each[0]) % OBSERVED] for each in both]
    shares = [
        observed,
        *({"full": rest[0][i::PROCESSES], "stage": rest[1][i::PROCESSES]} for i in range(PROCESSES)),
    ]
    await asyncio.gather(*(ask(crowd, command | share) for crowd, share in zip(crowds, shares, strict=True)))


def _row(figures: Figures) -> tuple[str, ...]:
    worst = max(figures.latencies, key=lambda kind: percentile(figures.latencies[kind], 0.99))
    everything = sum(figures.latencies.values(), Counter[int]())
    return (
        f"{figures.peers:,}",
        f"{figures.rounds}",
        f"{figures.seconds / (figures.rounds - 1):.1f}",
        f"{figures.cpu / figures.seconds:.2f}",
        f"{percentile(everything, 0.5)}",
        f"{percentile(everything, 0.99)}",
        f"{percentile(figures.latencies[worst], 0.99)}",
        worst,
        f"{figures.memory / 2**20:,.0f}",
        f"{figures.log_bytes / 1e6:.2f}",
        f"{figures.log_events:,.0f}",
    )


def _notes(figures: Figures) -> list[str]:
    calls = ", ".join(
        f"{kind} {percentile(found, 0.5)} / {percentile(found, 0.99)}"
        for kind, found in sorted(figures.latencies.items())
    )
    largest = sorted(figures.log.items(), key=lambda each: -each[1][1])[:_SHOWN]
    kinds = ", ".join(f"{kind} {count:,.0f} ({nbytes / 1e6:.3f} MB)" for kind, (count, nbytes) in largest)
    return [
        f"{figures.peers:,} peers, p50 / p99 of each call in ms: {calls}.",
        f"{figures.peers:,} peers, events of a round: {kinds}. Each peer received "
        f"{figures.watched / figures.peers / 1e6:.2f} MB of updates in the whole run.",
    ]


def table(quick: bool, shapes: tuple[tuple[int, int, float, float], ...] = ()) -> Table:
    if not Path("/proc/self/status").exists():
        raise NotHere("it reads the memory of processes from /proc, which this system has not")
    found = []
    for shape in shapes or (QUICK if quick else SHAPES):
        with tempfile.TemporaryDirectory() as folder:
            found.append(asyncio.run(measure(Path(folder), *shape)))
    return Table(
        "A coordinator under load",
        "python -m benchmarks.coordinator" + (" --quick" if quick else ""),
        (
            "peers",
            "rounds",
            "round, s",
            "CPU, cores",
            "p50, ms",
            "p99, ms",
            "slowest p99, ms",
            "of",
            "memory, MiB",
            "log a round, MB",
            "events a round",
        ),
        tuple(map(_row, found)),
        (
            f"A fifth are full replicas, the others pipelines of {STAGES}. {1 + PROCESSES} processes of them "
            "share the machine with the coordinator. The first round does not count. Latencies are those of "
            f"every {OBSERVED}th peer; these have a process of their own.",
            "Match and Report wait for all members: they count from the last call that they wait for.",
            *(note for each in found for note in _notes(each)),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    parser.add_argument(
        "--gathering", type=float, default=_GATHERING, help="over how many seconds members report"
    )
    chosen = parser.parse_args()
    shape = chosen.peers, max(2, chosen.rounds), chosen.seconds, chosen.gathering
    shapes = (shape,) if chosen.peers else ()
    print(machine())
    print(table(chosen.quick, shapes).markdown)


if __name__ == "__main__":
    main()
