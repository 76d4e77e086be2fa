"""The real dashboard of a long run of many peers, and ``hetnode explain``: seconds of each request, memory.

    python -m benchmarks.history_pages FOLDER --peers 1000 --rounds 10000

serves the history in FOLDER as the coordinator of such a run does, in a process of its own, and asks for each
page over HTTP. benchmarks.history fills the history and calls this.

The state of the run is that of its open round: all peers, plans and decisions are there, but equal decisions
share their entries. The event log has the rows that questions read, at the numbers that they have in the run.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.history_events import LOSS_EVERY, STAGES, peer_id, plan_of, spec_of, story
from benchmarks.tables import Table
from coordinator.api.explaining import Explainer
from coordinator.dashboard.dashboard import Dashboard
from coordinator.dashboard.folder import url_in
from coordinator.explain.log_index import AdoptedPlan, LogIndex
from coordinator.state.apply import replay
from coordinator.state.event_codec import encode
from coordinator.state.events import Event, PayloadOffered, PlanAdopted, RoundCommitted
from coordinator.state.state import State
from coordinator.storage.history_schema import HISTORY_FILE
from coordinator.storage.store import SqliteStore
from protocol.status import Measurement
from protocol.types import PeerId

REPEATS = 3
_ROUND_SECONDS = 60.0
_KEPT_SECONDS = 11.0
"""Longer than the dashboard keeps an answer."""
_LOG = "benchmark.sqlite"


@dataclass(frozen=True)
class Request:
    """Of one page or its data.

    Attributes:
        cold_seconds: of the first one, with nothing of the history in memory.
        seconds, cpu_seconds: medians of the others; CPU is that of the whole process.
        nbytes: of the answer as it travels.
    """

    path: str
    cold_seconds: float
    seconds: float
    cpu_seconds: float
    nbytes: int


@dataclass(frozen=True)
class Served:
    """All requests; `memory` and `idle_memory` are of the process, at most and before the first, in bytes."""

    requests: tuple[Request, ...]
    idle_memory: int
    memory: int

    @property
    def table(self) -> Table:
        def row(each: Request) -> tuple[str, ...]:
            times = (each.cold_seconds, each.seconds, each.cpu_seconds)
            return f"`{each.path[:40]}`", *(f"{1000 * time:.0f}" for time in times), f"{each.nbytes:,}"

        return Table(
            "Pages of the dashboard, and explanations",
            "python -m benchmarks.history --pages --folder DIR",
            ("request", "first, ms", "others, ms", "their CPU, ms", "bytes"),
            tuple(map(row, self.requests)),
            (
                "First: with nothing of the history in memory. Others: the median of "
                f"{REPEATS}, none from the dashboard's own copies; CPU is that of the whole process.",
                f"The process had {self.idle_memory >> 20} MiB before the first request, and at most "
                f"{self.memory >> 20} MiB.",
            ),
        )


def paths(peers: int, rounds: int) -> list[str]:
    """Each page with the data that it asks for: the largest and the most distant parts."""
    middle, peer = rounds // 2, peer_id(peers // 2)
    return [
        *("/", "/events", "/api/losses", "/api/explain?question=now"),
        *("/swarm", "/api/swarm", "/network", "/api/network", "/api/speed", "/api/traffic"),
        *("/rounds", "/api/rounds", f"/api/rounds?before={middle}"),
        *(f"/round/{middle}", f"/api/round?round={middle}", f"/api/explain?question={middle}"),
        f"/api/explain?question={rounds - LOSS_EVERY}",
        *("/leaderboard", "/api/credits?order=link", f"/api/credits?skip={max(0, peers - 100)}"),
        *(f"/peer/{peer}", f"/api/peer?peer={peer}", f"/api/explain?question={peer}"),
    ]


def measure(folder: Path, peers: int, rounds: int) -> Served:
    """Serve `folder` in a process of its own, and ask for everything."""
    command = [sys.executable, "-m", "benchmarks.history_pages", str(folder), "--serve"]
    command += ["--peers", str(peers), "--rounds", str(rounds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        url = process.stdout.readline().strip()
        assert url, "the server did not start"
        server = psutil.Process(process.pid)
        idle = server.memory_info().rss
        found: dict[str, list[tuple[float, float, int]]] = {}
        for _ in range(1 + REPEATS):
            if not found:
                _forget(folder / HISTORY_FILE)
            for path in paths(peers, rounds):
                found.setdefault(path, []).append(_asked(url, path, server))
            time.sleep(_KEPT_SECONDS)
        memory = _peak_memory(process.pid)
        process.stdin.close()
        process.wait(60)
    return Served(tuple(_request(path, each) for path, each in found.items()), idle, memory)


def _request(path: str, found: Sequence[tuple[float, float, int]]) -> Request:
    (cold, _, nbytes), *warm = found
    return Request(path, cold, median(each[0] for each in warm), median(each[1] for each in warm), nbytes)


def _asked(url: str, path: str, server: psutil.Process) -> tuple[float, float, int]:
    parts = urlsplit(url)
    assert parts.hostname
    before, began = sum(server.cpu_times()[:2]), time.perf_counter()
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=120)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        # The stream has no end; its first event is two lines.
        is_stream = path == "/events"
        body = b"".join(answer.readline() for _ in range(2)) if is_stream else answer.read()
        seconds = time.perf_counter() - began
    finally:
        connection.close()
    assert answer.status == 200, (path, answer.status, body[:200])
    return seconds, sum(server.cpu_times()[:2]) - before, len(body)


def _forget(path: Path) -> None:
    """Drop what the operating system keeps of the file in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _peak_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def long_run(peers: int, rounds: int) -> tuple[State, LogIndex, list[tuple[int, Event]], list[Measurement]]:
    """The state in the last round of a run, the index and the needed rows of its log, its measurements."""
    spec = spec_of(rounds)
    index, parts = LogIndex(spec.swarm.stages), []
    for found, measured in story(peers, LOSS_EVERY):
        parts.append((index.length + 1, found, measured))
        for event in found:
            index.note(event)
    marks, joins = index.rounds, parts[0][1]
    length, first = index.length - len(joins), len(joins)
    wanted = {*range(rounds // 2 - 5, rounds // 2 + 1), *range(rounds - 2 * LOSS_EVERY, rounds)}
    rows = list(enumerate(joins, start=1))
    index.rounds = []
    for number in range(1, rounds):
        copies, place = divmod(number - 1, LOSS_EVERY)
        later, shift = _ROUND_SECONDS * LOSS_EVERY * copies, length * copies
        mark = marks[place]
        times = {
            name: getattr(mark, name) + later
            for name in ("began_at", "offered_at", "closed_at", "reported_at", "decided_at")
        }
        mark = replace(mark, number=number, first=mark.first + shift, last=mark.last + shift, **times)
        index.rounds.append(mark)
        if number in wanted:
            begin, events, _ = parts[place + 1]
            rows += [(begin + shift + i, _later(event, later, number)) for i, event in enumerate(events)]
    newest = index.rounds[-1]
    index.length, index._began = newest.last, (newest.last, newest.decided_at)
    index.plans = {
        epoch: AdoptedPlan(first + length * (epoch - 1), 1 + LOSS_EVERY * (epoch - 1))
        for epoch in range(1, 1 + rounds // LOSS_EVERY)
    }
    return _state(peers, rounds, parts[0][1], parts[1][1], newest.decided_at), index, rows, parts[-1][2]


def _later(event: Event, seconds: float, round_number: int) -> Event:
    """The same event in another round."""
    event, epoch = replace(event, at=event.at + seconds), 1 + (round_number - 1) // LOSS_EVERY
    if isinstance(event, PlanAdopted):
        return replace(event, plan=replace(event.plan, epoch=epoch + 1, from_round=round_number + 1))
    if isinstance(event, RoundCommitted):
        decided = replace(event.decision, round_number=round_number, next_epoch=epoch)
        return replace(event, decision=decided)
    if isinstance(event, PayloadOffered):
        offered = replace(event.descriptor, round_number=round_number, epoch=epoch)
        return replace(event, descriptor=offered)
    if hasattr(event, "round_number"):
        return replace(event, round_number=round_number)
    return event


def _state(peers: int, rounds: int, joins: list[Event], first: list[Event], at: float) -> State:
    state = replay(State(spec_of(rounds), "benchmark"), [*joins, *first])
    replicas = plan_of(1, 1, peers).replicas
    plans = tuple(
        replace(plan_of(1, 1, 0), epoch=1 + i, from_round=1 + i * LOSS_EVERY, replicas=replicas)
        for i in range(rounds // LOSS_EVERY)
    )
    decided = {each.decision.stage: each.decision for each in first if isinstance(each, RoundCommitted)}
    decisions = {
        (stage, number): replace(decided[stage], round_number=number)
        for number in range(1, rounds)
        for stage in range(STAGES)
    }
    seen = {peer: replace(each, at=at, round_number=rounds) for peer, each in state.last_seen.items()}
    return replace(
        state,
        plans=plans,
        assignments={plans[-1].epoch: next(iter(state.assignments.values()))},
        decisions=decisions,
        current_round=rounds,
        committed=len(decisions),
        began_at=at,
        latest_at=at,
        last_seen=seen,
        round_durations=(_ROUND_SECONDS,) * 5,
    )


def write_log(path: Path, peers: int, rounds: int, rows: Sequence[tuple[int, Event]]) -> SqliteStore:
    store = SqliteStore(path, PeerId("benchmark"), lambda message: b"\0" * 64)
    store.begin(spec_of(rounds).canonical_json)
    encoded = ((number, *encode(event), b"") for number, event in rows)
    store._db.execute("BEGIN")
    store._db.executemany("INSERT INTO events (sequence, kind, body, row_hash) VALUES (?, ?, ?, ?)", encoded)
    store._db.execute("COMMIT")
    return store


async def serve(folder: Path, peers: int, rounds: int) -> None:
    """Until standard input ends."""
    state, index, rows, measured = long_run(peers, rounds)
    (folder / _LOG).unlink(missing_ok=True)
    store = write_log(folder / _LOG, peers, rounds, rows)
    rows.clear()
    began = time.monotonic()
    loop: Any = SimpleNamespace(state=state, now=lambda: state.latest_at + 30.0 + time.monotonic() - began)
    newest = {each.peer: replace(each, round_number=rounds - 1, agreements=()) for _, each in measured}
    metrics: Any = SimpleNamespace(newest=newest)
    explainer = Explainer(loop, store, index, metrics)
    health = SimpleNamespace(latest=None)
    records: Any = SimpleNamespace(
        metrics=metrics,
        health=health,
        explainer=explainer,
        tokens=SimpleNamespace(newest=10**12),
        resting=Counter[PeerId](),
    )
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        Dashboard("127.0.0.1:0", False, stack).serve(folder, loop, records, lambda: "")
        print(url_in(folder), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--serve", action="store_true", help="serve until standard input ends")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.folder, arguments.peers, arguments.rounds))
        return
    print(measure(arguments.folder, arguments.peers, arguments.rounds).table.markdown)


if __name__ == "__main__":
    main()
