"""What many calls at one moment cost in gRPC and TLS alone: the least that a coordinator's answers take here.

    python -m benchmarks.calls                     # 1,000 clients
    python -m benchmarks.calls --clients 300

A server whose handler answers 50 bytes at once, without a gateway, an admission or a state. Each client has a
connection and a certificate of its own. Two processes contain the clients; all share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks.coordinator import percentile
from benchmarks.processes import ask, end_processes, start_process
from benchmarks.tables import Table, machine

PROCESSES = 2
MOMENTS = 5
"""The middle one of so many counts."""
KINDS = (
    ("one call each", "unary", 1),
    ("two calls each", "unary", 2),
    ("one message in a stream", "stream", 1),
)


async def measure(clients: int, kind: str, calls: int) -> tuple[str, ...]:
    """Calls, seconds until all are answered, CPU of the server for each in ms, p50 and p99 in ms."""
    command = [sys.executable, "-m", "benchmarks.calls_member"]
    processes = [await start_process(command) for _ in range(1 + PROCESSES)]
    server, crowds = processes[0], processes[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name))
        try:
            served = await ask(server, {"do": "serve", "folder": folder})
            shares = [range(i, clients, PROCESSES) for i in range(PROCESSES)]
            for crowd, share in zip(crowds, shares, strict=True):
                joining = {"do": "connect", "folder": folder, "address": served["address"], "kind": kind}
                await ask(crowd, joining | {"numbers": [*share]})
            found = []
            for _ in range(MOMENTS):
                before, began = await ask(server, {"do": "cpu"}), time.monotonic()
                answers = await asyncio.gather(
                    *(ask(each, {"do": "call", "calls": calls}) for each in crowds)
                )
                seconds, after = time.monotonic() - began, await ask(server, {"do": "cpu"})
                latencies = Counter(round(1000 * each) for answer in answers for each in answer["seconds"])
                cpu = (after["seconds"] - before["seconds"]) / latencies.total()
                found.append((seconds, cpu, percentile(latencies, 0.5), percentile(latencies, 0.99)))
        finally:
            await end_processes(processes)
    seconds, cpu, half, most = map(median, zip(*found, strict=True))
    return f"{clients * calls:,}", f"{seconds:.3f}", f"{1000 * cpu:.2f}", f"{half:.0f}", f"{most:.0f}"


def table(clients: int) -> Table:
    rows = tuple((name, *asyncio.run(measure(clients, kind, calls))) for name, kind, calls in KINDS)
    columns = ("all at one moment", "calls", "s", "CPU of each at the server, ms", "p50, ms", "p99, ms")
    return Table("Calls without a coordinator", "python -m benchmarks.calls", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    print(machine())
    print(table(parser.parse_args().clients).markdown)


if __name__ == "__main__":
    main()
