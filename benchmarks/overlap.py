"""How much faster a swarm is if a round's exchange overlaps the next round's first steps.

    python -m benchmarks.overlap           # overlap 0, 3, 6, 9 of 10 steps, and stages in turn: some minutes
    python -m benchmarks.overlap --quick   # 0 and 6, below 2 minutes

A real swarm for each row: a coordinator and two full replicas, in network namespaces of their own
(benchmarks.shaping.Homes). The replicas' access links are so narrow that exchanging payloads takes a good
share of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shaping import FRAME_SHARE, Homes
from benchmarks.tables import NotHere, Table
from node.views import run_history
from node.views.plan import payload_bytes
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.run import RunSpec

BITS_PER_SECOND = 2e6
_OPTIONS = {
    "swarm.replicas": 2,
    "swarm.pipelines": 0,
    "swarm.stages": 2,
    "data.validation_batches": 1,
    "outer.top_k": 512,
    "outer.quantizer": "none",
}
"""Large payloads for a small model: on this link, an exchange takes as long as several steps."""

STEPS = 10
"""Between two exchanges of a stage."""
_START_SECONDS = 60.0
_RUN_SECONDS = 240.0
_POLL_SECONDS = 0.1
_WARM_UP = 2
"""Rounds that are not timed: they open connections and touch memory for the first time."""


@dataclass(frozen=True)
class Case:
    """One row: `overlap` steps, and in how many `turns` the stages exchange within STEPS."""

    overlap: int
    turns: int = 1


@dataclass(frozen=True)
class Result:
    """`seconds` of STEPS inner steps, from decision to decision."""

    case: Case
    seconds: float


QUICK = (Case(0), Case(6))
CASES = (Case(0), Case(3), Case(6), Case(9), Case(2, 2), Case(4, 2))


def spec_of(case: Case, rounds: int) -> RunSpec:
    """The run of one row, of `rounds` times STEPS."""
    own = {
        "rounds": rounds * case.turns,
        "inner.steps": STEPS // case.turns,
        "outer.overlap": case.overlap,
        "outer.turns": case.turns,
    }
    return resolve("tiny", overrides={**_OPTIONS, **own})


def round_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Median seconds from one round's last decision to that of the next, without the first rounds.

    Raises RuntimeError if fewer than two rounds are left, or one was aborted.
    """
    decided: dict[int, float] = {}
    for event in events:
        if event["event"] == "decision":
            if not event["committed"]:
                raise RuntimeError(f"round {event['round']} was aborted: {event['reason']}")
            decided[event["round"]] = max(event["time"], decided.get(event["round"], 0.0))
    timed = [decided[round_number] for round_number in sorted(decided) if round_number >= _WARM_UP]
    if len(timed) < 2:
        raise RuntimeError(f"only {len(decided)} rounds were decided")
    return statistics.median(later - earlier for earlier, later in pairwise(timed))


async def run_swarm(spec: RunSpec, homes: Homes) -> float:
    """Seconds of a round of a whole run of `spec`, with the coordinator in home 0 and replicas in the others.

    Raises RuntimeError, with the end of the logs, if the run fails or takes too long.
    """
    folder = Path(tempfile.mkdtemp(prefix="o-"))
    run, invite = folder / "run", folder / "invite"
    processes: list[asyncio.subprocess.Process] = []

    async def start(home: int, name: str, *arguments: str) -> asyncio.subprocess.Process:
        with (folder / f"{name}.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *homes.command(home, [sys.executable, "-m", "node", *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=Path(__file__).parents[1],
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
            )
        processes.append(process)
        return process

    try:
        (folder / "run.toml").write_text(to_toml(spec))
        await start(
            *(0, "coordinator", "coordinator", "--config", str(folder / "run.toml"), "--folder", str(run)),
            *("--listen", f"{homes.addresses[0]}:7700", "--dht-port", "7702"),
        )
        await _until((run / "address").exists, "the coordinator does not listen", folder)
        # This needs the run's folder only, no connection.
        made = await start(
            0, "invite", "invite", "create", "--uses", "9", "--folder", str(run), "--out", str(invite)
        )
        await made.wait()
        replicas = [
            await start(
                *(home, f"replica-{home}", "join", "--invite-file", str(invite), "--role", "replica"),
                *("--no-measure", "--threads", "1", "--folder", str(folder / str(home))),
                *("--identity", str(folder / f"{home}.key"), "--listen", f"{address}:0"),
                *("--advertise", address),
            )
            for home, address in enumerate(homes.addresses)
            if home
        ]
        try:
            async with asyncio.timeout(_RUN_SECONDS):
                ends = [await replica.wait() for replica in replicas]
        except TimeoutError:
            raise RuntimeError(f"not over after {_RUN_SECONDS:.0f} s\n{_end_of_logs(folder)}") from None
        if any(ends):
            raise RuntimeError(f"a replica has failed\n{_end_of_logs(folder)}")
        return round_seconds(run_history.read_events(run / "metrics.jsonl"))
    finally:
        await _end(processes)
        shutil.rmtree(folder, ignore_errors=True)


async def _until(condition: Callable[[], bool], otherwise: str, folder: Path) -> None:
    ends = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise RuntimeError(f"{otherwise}\n{_end_of_logs(folder)}")
        await asyncio.sleep(_POLL_SECONDS)


def _end_of_logs(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- {log.stem}\n{log.read_text(errors='replace')[-800:]}" for log in logs)


async def _end(processes: Sequence[asyncio.subprocess.Process]) -> None:
    """Kill the processes and their children."""
    for process in processes:
        if process.returncode is None:
            with suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def measure(cases: Sequence[Case], rounds: int) -> list[Result]:
    """One swarm after the other."""
    results = []
    async with AsyncExitStack() as stack:
        homes = await stack.enter_async_context(Homes.open(3))
        await homes.shape(BITS_PER_SECOND, homes=(1, 2))
        for case in cases:
            seconds = await run_swarm(spec_of(case, rounds), homes)
            results.append(Result(case, case.turns * seconds))
    return results


def rows_of(results: Sequence[Result]) -> tuple[tuple[str, ...], ...]:
    """One row for each result, with the gain over the first."""
    base = results[0].seconds
    return tuple(
        (
            f"{each.case.turns}",
            f"{each.case.overlap} of {STEPS // each.case.turns}",
            f"{each.seconds:.2f}",
            f"{base / each.seconds:.2f}x",
        )
        for each in results
    )


def table(quick: bool) -> Table:
    """Measure. Raises NotHere if links cannot be shaped."""
    if missing := Homes.missing():
        raise NotHere(f"no links of a chosen bandwidth here: {missing}")
    cases, rounds = (QUICK, 10) if quick else (CASES, 16)
    results = asyncio.run(measure(cases, rounds))
    spec = spec_of(Case(0), rounds)
    nbytes = sum(payload_bytes(spec))
    ideal = 8 * nbytes / (BITS_PER_SECOND * FRAME_SHARE)
    return Table(
        "Overlap of the exchange with the next round's steps",
        f"python -m benchmarks.overlap{' --quick' * quick}",
        ("outer.turns", "outer.overlap, of steps of a round", f"{STEPS} steps, s", "gain"),
        rows_of(results),
        (
            f"A coordinator and two full replicas, d {spec.model.width}, {spec.model.layers} layers, whose "
            f"access links carry {BITS_PER_SECOND / 1e6:.0f} Mb/s in each direction. A round's payload "
            f"has {nbytes / 1e3:,.0f} kB, which these links carry in {ideal:.2f} s at best.",
            f"Median from decision to decision, over {rounds - _WARM_UP} rounds or more, with validation.",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="overlap 0 and 6 only, fewer rounds")
    print(table(parser.parse_args().quick).markdown)


if __name__ == "__main__":
    main()
