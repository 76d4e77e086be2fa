"""How well a pipeline over slow links keeps its members busy, against what the cost model predicts.

    python -m benchmarks.pipeline                        # the whole table, below 30 minutes
    python -m benchmarks.pipeline --quick                # two members, a few cases, below 4 minutes
    python -m benchmarks.pipeline --members 4 --pace 300 # 4 members of 300 ms per microbatch each

Every member is a process of its own, pinned to a core, with its worker, the production pipeline and gRPC
links under mutual TLS. Links are real TCP between network namespaces, shaped by ``tc tbf`` in each direction.
Without namespaces (they need root and Linux) all traffic passes a relay that limits the bandwidth.

Members that share a core wait for each other; independent machines do not. So with more members than cores
every forward and backward pass is paced: after computing it sleeps until a fixed time is over. The table
marks these rows.

Each prediction uses the shaped bandwidth, the bytes of a message (coordinator.placement.cost_model), and the
seconds of one microbatch from one of three sources. "Alone": one member at a time over unshaped links, plus
the processor time that the node's main process takes for the messages, since it shares the member's cores.
"Live": the steps just before, as the coordinator continues with live figures. "As computed": the same steps;
if this differs from live, the speed of the machine has changed, and if it is wrong, so is the model of links.
A case is repeated, and each repetition measures alone, then live, then the step: other programs slow all of
them down. Ratios are medians of the repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.pipeline_member import member_name
from benchmarks.pipeline_results import Case, Result, document_of, median_of, rows_of, summary_of, table_of
from benchmarks.processes import ask, end_processes, pems_of, start_process
from benchmarks.shaping import Namespaces, Relays, Shaper
from coordinator.placement.cost_model import message_bytes
from coordinator.placement.schedule import LinkTime, StepTime
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.certificates import credentials

MODEL = {
    "model.width": 256,
    "model.layers": 4,
    "model.heads": 4,
    "model.feed_forward": 128,
    "model.context": 256,
    "swarm.stages": 4,
    "inner.steps": 4,
    "inner.microbatches": 8,
    "inner.microbatch_size": 4,
}
"""Small enough for seconds per step on one core, wide enough that a link of 10 Mb/s cannot carry it whole."""


class Chain:
    """The members' processes, connected."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes
        self._round = 0

    async def ask(self, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send a command to each member at the same time. Raises RuntimeError if one has ended."""
        return await asyncio.gather(*map(ask, self._processes, arguments))

    async def train(self, k: int, steps: int, microbatches: int) -> list[dict[str, Any]]:
        """Take `steps` inner steps on all members. Returns the answers of PipelineMember.train."""
        self._round += 1
        command = {"do": "train", "round_number": self._round, "k": k, "steps": steps}
        return await self.ask([{**command, "microbatches": microbatches}] * len(self._processes))


@asynccontextmanager
async def chain_of(spec: RunSpec, members: int, shaper: Shaper, pace: float) -> AsyncIterator[Chain]:
    """Start `members` processes and connect them; `pace` as in :mod:`benchmarks.paced_worker`."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    command = shaper.command([sys.executable, "-m", "benchmarks.pipeline_member"])
    processes = []
    try:
        for _ in range(members):
            processes.append(
                await start_process(command, GRPC_ENABLE_FORK_SUPPORT="false", GRPC_VERBOSITY="NONE")
            )
        chain = Chain(processes)
        starts = [
            {
                "do": "start",
                "spec": spec.canonical_json,
                "position": position,
                "members": members,
                "core": cores[position % len(cores)],
                "pace": pace,
                "shown": pems_of(credentials(member_name(position))),
            }
            for position in range(members)
        ]
        ports = [started["port"] for started in await chain.ask(starts)]
        endpoints = await shaper.join([process.pid for process in processes], ports[1:])
        await chain.ask([{"do": "connect", "endpoint": endpoint} for endpoint in [*endpoints, None]])
        yield chain
    finally:
        await shaper.close()
        await end_processes(processes)


def compute_seconds(members: Sequence[Sequence[dict[str, Any]]], microbatches: int) -> tuple[float, ...]:
    """Seconds of one microbatch, by member, from their steps."""
    return tuple(statistics.median(map(_busy, steps)) / microbatches for steps in members)


def handling_seconds(members: Sequence[Sequence[dict[str, Any]]], paced: bool) -> tuple[float, ...]:
    """As :func:`compute_seconds`, of the main process, in steps of one microbatch.

    None where passes are paced: they sleep for most of their time, and the main process has the core.
    """
    return tuple(0.0 if paced else statistics.median(step["handled"] for step in steps) for steps in members)


def _busy(step: dict[str, Any]) -> float:
    return sum(seconds for _, seconds in step["passes"])


def predict(
    spec: RunSpec, case: Case, compute: Sequence[float], payload_share: float, delay: float
) -> StepTime:
    """The cost model's step for `case`, from the members' seconds per microbatch."""
    down, up = message_bytes(spec, case.k)
    rate = case.bandwidth * payload_share / 8
    link = LinkTime(down / rate, up / rate, delay)
    return StepTime(tuple(compute), (link,) * (case.members - 1), spec.inner.microbatches)


async def measure(
    spec: RunSpec, cases: Sequence[Case], shaper: Shaper, pace: float, steps: int, delay: float, repeats: int
) -> AsyncIterator[Result]:
    """Measure cases of equally many members."""
    async with chain_of(spec, cases[0].members, shaper, pace) as chain:
        for case in cases:
            yield median_of(
                [await _once(chain, spec, case, shaper, pace, steps, delay) for _ in range(repeats)]
            )


async def _once(
    chain: Chain, spec: RunSpec, case: Case, shaper: Shaper, pace: float, steps: int, delay: float
) -> Result:
    microbatches = spec.inner.microbatches
    await shaper.shape(math.inf)
    # With one microbatch in a step no two members ever compute at the same time. The first step warms up.
    single = [answer["steps"][1:] for answer in await chain.train(case.k, steps=4, microbatches=1)]
    await shaper.shape(case.bandwidth)
    answers = await chain.train(case.k, 1 + 2 * steps, microbatches)
    # The first step fills the queues of links whose bandwidth has changed.
    before = [answer["steps"][1 : 1 + steps] for answer in answers]
    measured = [answer["steps"][1 + steps :] for answer in answers]
    seconds = statistics.mean(step["seconds"] for step in measured[0])
    compute, handling = compute_seconds(single, 1), handling_seconds(single, pace > 0)
    live, computed = (compute_seconds(each, microbatches) for each in (before, measured))

    def predicted(source: Sequence[float]) -> StepTime:
        return predict(spec, case, source, shaper.payload_share, delay)

    together = [sum(each) for each in zip(compute, handling, strict=True)]
    return Result(
        case,
        pace > 0,
        compute,
        handling,
        seconds,
        predicted(live).seconds,
        seconds / predicted(together).seconds,
        seconds / predicted(live).seconds,
        seconds / predicted(computed).seconds,
        tuple(microbatches * each / seconds for each in computed),
        predicted(live).utilization,
        answers[0]["bytes_sent"] / (1 + 2 * steps),
    )


def arguments_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, nargs="+", choices=(2, 4), default=None)
    parser.add_argument("--ratios", type=int, nargs="+", default=None, help="d/k; 0 is uncompressed")
    parser.add_argument(
        "--bandwidths", type=float, nargs="+", default=None, metavar="MBPS", help="Mb/s; 0 is unshaped"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=None,
        metavar="MS",
        help="ms that a microbatch takes a member at least; 0: as long as it computes. "
        "Default: 0 where every member has a core, else 300",
    )
    parser.add_argument("--steps", type=int, default=2, help="measured inner steps per case")
    parser.add_argument("--repeats", type=int, default=3, help="of each case")
    parser.add_argument("--shaper", choices=("namespaces", "relay"), default=None)
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="one way; relay only")
    parser.add_argument("--quick", action="store_true", help="two members, a few cases")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    parser.add_argument("--markdown", action="store_true", help="print the table for the documentation")
    arguments = parser.parse_args(given)
    if arguments.delay and arguments.shaper != "relay":
        parser.error("--delay needs --shaper relay")
    quick = arguments.quick
    arguments.members = arguments.members or ([2] if quick else [2, 4])
    arguments.ratios = (
        arguments.ratios if arguments.ratios is not None else ([0, 8] if quick else [0, 1, 8, 32])
    )
    arguments.bandwidths = arguments.bandwidths or ([0, 10, 100] if quick else [0, 10, 50, 100])
    return arguments


def shaper_of(name: str | None, delay: float, console: Console) -> Shaper:
    """Namespaces if they are possible and `name` is not "relay", else relays. Prints the choice."""
    missing = Namespaces.missing() if name != "relay" else "--shaper relay was given"
    if missing and name == "namespaces":
        raise SystemExit(f"no network namespaces: {missing}")
    if missing:
        console.print(f"links go through a relay in this process: {missing}")
        return Relays(delay)
    console.print("links are TCP between network namespaces, shaped by tc tbf")
    return Namespaces()


async def run(arguments: argparse.Namespace, console: Console) -> list[Result]:
    """Measure all cases of `arguments`."""
    spec = resolve("tiny", overrides=MODEL)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    console.print(
        f"d {spec.model.width}, {spec.model.layers} layers, {spec.inner.microbatches} microbatches of "
        f"{spec.inner.microbatch_size} x {spec.model.context} tokens, {spec.link.dtype}; {cores} cores"
    )
    results = []
    delay = arguments.delay / 1000
    shaper = shaper_of(arguments.shaper, delay, console)
    for members in arguments.members:
        pace = arguments.pace if arguments.pace is not None else (0.0 if members <= cores else 300.0)
        cases = [
            Case(members, spec.model.width // ratio if ratio else 0, 1e6 * bandwidth or math.inf)
            for ratio, bandwidth in product(arguments.ratios, arguments.bandwidths)
        ]
        async for result in measure(
            spec, cases, shaper, pace / 1000, arguments.steps, delay, arguments.repeats
        ):
            results.append(result)
            console.print("  ".join(next(rows_of([result], spec.model.width))[:10]), highlight=False)
    return results


def table(quick: bool) -> tables.Table:
    """Measure, and return the table for the documentation."""
    options = ["--quick"] * quick
    results = asyncio.run(run(arguments_of(options), Console(stderr=True, width=120)))
    return document_of(results, MODEL["model.width"], " ".join(["python -m benchmarks.pipeline", *options]))


def main() -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 120
    arguments = arguments_of()
    results = asyncio.run(run(arguments, console))
    width = MODEL["model.width"]
    console.print(table_of(results, width))
    console.print(summary_of(results))
    if arguments.markdown:
        print(
            document_of(results, width, " ".join(["python -m benchmarks.pipeline", *sys.argv[1:]])).markdown
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
