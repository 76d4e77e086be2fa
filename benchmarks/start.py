"""What a start of the coordinator costs after many rounds: from its whole log, and from a snapshot.

    python -m benchmarks.start                          # 1,000 and 4,000 rounds of 2 peers, 5 of 1,000
    python -m benchmarks.start --peers 2 --rounds 100000

The rules write a log, as in `benchmarks.rules`. Other processes then start with it, so that their memory
contains nothing of the writing: the first from the log, after which it writes a snapshot; the second from
that. A start may have ROWS_BETWEEN more rows to replay, in two seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path

from benchmarks.coordinator import spec_of
from benchmarks.rules import Swarm
from benchmarks.tables import Table, machine
from coordinator.state.events import Event, PeerSeen
from coordinator.storage import snapshots
from coordinator.storage.log_copy import NAME as LOG
from coordinator.storage.restored_run import restore_run
from coordinator.storage.snapshots import SNAPSHOT_FILE
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


async def start(folder: Path, spec: RunSpec) -> dict[str, float]:
    """Seconds of CPU of a start and of the snapshot after it, rounds decided, events, most memory in MiB."""
    before, began = _most_memory(), time.process_time()
    async with AsyncExitStack() as stack:
        store = _opened(folder / LOG)
        stack.callback(store.close)
        run = restore_run(stack, store, spec, spec.name, folder)
        found = {
            "rounds": run.state.rounds_decided,
            "events": run.index.length,
            "restore": time.process_time() - began,
            "memory": _most_memory() - before,
        }
        begun = time.process_time()
        run.keep_snapshot(run.state)
    return found | {"writing": time.process_time() - begun}


def _most_memory() -> float:
    # Not getrusage: that contains what the process had before it began to run this program.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def measure(peers: int, rounds: int) -> tuple[dict[str, float], dict[str, float], float, float]:
    """The costs of a start from the log and of one from a snapshot, and the megabytes of log and snapshot."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder / LOG, peers, rounds)
        command = [sys.executable, "-m", "benchmarks.start", "--of", name, str(peers), str(rounds)]
        first, second = (
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        )
        sizes = ((folder / each).stat().st_size / 1e6 for each in (LOG, SNAPSHOT_FILE))
        return first, second, *sizes


def table(shapes: Sequence[tuple[int, int]]) -> Table:
    rows = []
    for peers, rounds in shapes:
        first, second, log, snapshot = measure(peers, rounds)
        rows.append(
            (
                f"{peers:,}",
                f"{first['rounds']:,.0f}",
                f"{first['events']:,.0f}",
                f"{log:.1f}",
                f"{first['restore']:.1f}",
                f"{first['memory']:.0f}",
                f"{snapshot:.2f}",
                f"{first['writing']:.2f}",
                f"{second['restore']:.1f}",
                f"{second['memory']:.0f}",
            )
        )
    return Table(
        "A start after many rounds",
        "python -m benchmarks.start",
        (
            "peers",
            "rounds",
            "events",
            "log, MB",
            "from the log: CPU, s",
            "memory, MiB",
            "snapshot, MB",
            "writing it: CPU, s",
            "from the snapshot: CPU, s",
            "memory, MiB",
        ),
        tuple(rows),
        ("Memory is the most that the start adds to the process. The log's hash chain is verified in both.",),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, help="with --rounds, instead of the usual shapes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--of", nargs=3, metavar=("FOLDER", "PEERS", "ROUNDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of:
        path, peers, rounds = arguments.of
        snapshots.ROWS_BETWEEN = 1  # at once
        print(json.dumps(asyncio.run(start(Path(path), spec_of(int(peers), int(rounds) + 1)))))
        return
    print(machine())
    both = arguments.peers and arguments.rounds
    print(table([(arguments.peers, arguments.rounds)] if both else SHAPES).markdown)


if __name__ == "__main__":
    main()
