"""What a start of the coordinator costs after many rounds: its log is read, verified and replayed.

    python -m benchmarks.start                          # 1,000 and 4,000 rounds of 2 peers, 5 of 1,000
    python -m benchmarks.start --peers 2 --rounds 100000

The rules write a log, as in `benchmarks.rules`. Another process then starts with it, so that its memory
contains nothing of the writing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.coordinator import spec_of
from benchmarks.rules import Swarm
from benchmarks.tables import Table, machine
from coordinator.explain.log_index import LogIndex
from coordinator.history.ledger import Ledger
from coordinator.state.events import Event, PeerSeen
from coordinator.storage.decision_log import DecisionLog
from coordinator.storage.restore import restore
from coordinator.storage.store import SqliteStore
from protocol.spec.run import RunSpec
from tests.builders import keyed

SHAPES = ((2, 1000), (2, 4000), (1000, 5))
"""Peers and rounds."""
_EVENTS_AT_ONCE = 20_000


def _opened(path: Path) -> SqliteStore:
    return SqliteStore(path, keyed(0).peer, keyed(0).sign)


def write_log(path: Path, peers: int, rounds: int) -> None:
    """Write the log of so many rounds to `path`."""
    swarm, waiting = Swarm(peers, rounds + 1), list[Event]()
    with closing(_opened(path)) as store:
        store.begin(swarm.spec.canonical_json)
        swarm.rules.on_event = waiting.append
        swarm.join()
        swarm.start()
        for _ in range(rounds):
            swarm.play_round()
            if len(waiting) >= _EVENTS_AT_ONCE:
                store.append(_stored(waiting))
                waiting.clear()
        store.append(_stored(waiting))


def _stored(events: Sequence[Event]) -> list[Event]:
    return [each for each in events if not isinstance(each, PeerSeen)]


def start(path: Path, spec: RunSpec) -> dict[str, float]:
    """Seconds of CPU of a start, rounds decided, events, and the most memory, MiB."""
    before = _most_memory()
    began = time.process_time()
    stages = spec.swarm.stages
    with closing(_opened(path)) as store:
        index, decisions, ledger = LogIndex(stages), DecisionLog(store, stages), Ledger(spec)
        state = restore(store, spec, spec.name, (index.note, decisions.note, ledger.record))
    return {
        "rounds": state.rounds_decided,
        "events": index.length,
        "restore": time.process_time() - began,
        "memory": _most_memory() - before,
    }


def _most_memory() -> float:
    # Not getrusage: that contains what the process had before it began to run this program.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def measure(peers: int, rounds: int) -> tuple[dict[str, float], float]:
    """The costs of a start, and the megabytes of the log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.sqlite"
        write_log(path, peers, rounds)
        command = [sys.executable, "-m", "benchmarks.start", "--of", str(path), str(peers), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found, path.stat().st_size / 1e6


def table(shapes: Sequence[tuple[int, int]]) -> Table:
    rows = []
    for peers, rounds in shapes:
        found, size = measure(peers, rounds)
        rows.append(
            (
                f"{peers:,}",
                f"{found['rounds']:,.0f}",
                f"{found['events']:,.0f}",
                f"{size:.1f}",
                f"{found['restore']:.1f}",
                f"{found['memory']:.0f}",
            )
        )
    return Table(
        "A start after many rounds",
        "python -m benchmarks.start",
        ("peers", "rounds", "events", "log, MB", "CPU, s", "memory, MiB"),
        tuple(rows),
        ("Seconds of CPU. Memory is the most that the start adds to the process.",),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, help="with --rounds, instead of the usual shapes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--of", nargs=3, metavar=("LOG", "PEERS", "ROUNDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of:
        path, peers, rounds = arguments.of
        print(json.dumps(start(Path(path), spec_of(int(peers), int(rounds) + 1))))
        return
    print(machine())
    both = arguments.peers and arguments.rounds
    print(table([(arguments.peers, arguments.rounds)] if both else SHAPES).markdown)


if __name__ == "__main__":
    main()
