"""The time in which replicas with equal lines reduce their payloads in parts, and the bytes that this takes.

    python -m benchmarks.reduction           # 2, 4, 8 and 16 replicas, some minutes
    python -m benchmarks.reduction --quick   # 2 and 4 replicas

As :mod:`benchmarks.gathering`: nodes' hivemind hosts in network namespaces, one stage, and lines that carry
the same in both directions. The lines are slow and the stage is small, so that this machine, on whose cores
all replicas compute their sums, does not determine the time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from math import inf

from benchmarks.rounds import peers_at
from benchmarks.shaping import CONGESTION_CONTROL, FRAME_SHARE, Homes
from benchmarks.tables import NotHere, Table
from coordinator.reduction.traffic import reduction_of
from node.core.model.shapes import parameter_shapes
from protocol.reduction.counted_result import most_nbytes
from protocol.reduction.parts import ReductionLayout
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import MemberLine

_SECONDS = 5.0
"""In which a line carries the bytes of a round."""


def spec_of(replicas: int) -> RunSpec:
    """A run of one stage with 7 million parameters."""
    model = {"model.width": 384, "model.layers": 4, "model.feed_forward": 1024}
    members = {"swarm.stages": 1, "swarm.replicas": replicas, "swarm.pipelines": 0}
    return resolve("tiny", overrides={"outer.exchange": "reduced", **model, **members})


async def measure(replicas: int, rounds: int) -> tuple[str, ...]:
    """The row of so many replicas."""
    spec = spec_of(replicas)
    layout = ReductionLayout(parameter_shapes(spec, 0), spec.outer)
    payload, result = layout.payload.nbytes, layout.result.nbytes
    traffic = reduction_of([MemberLine(1, 1, True)] * replicas, result / payload)[0]
    nbytes = payload * max(traffic.sent, traffic.received)
    rate = nbytes / _SECONDS
    capacity = most_nbytes(sum(tensor.numel for tensor in layout.payload.tensors.values()))
    async with (
        Homes.open(replicas) as homes,
        peers_at(homes, 1, capacity, spec.model_dump_json()) as peers,
    ):
        await homes.shape(8 * rate / FRAME_SHARE)
        lines = [MemberLine(round(rate), round(rate), True)] * replicas
        measured = [await peers.run_round([payload], lines) for _ in range(1 + rounds)][1:]
        await homes.shape(inf)
    sockets = statistics.mean(each for each, _ in measured) / 2  # sent, and received by another one
    ratios = sorted(seconds / _SECONDS for _, seconds in measured)
    cells = (statistics.median(ratios), ratios[0], ratios[-1])
    return (
        *(f"{replicas}", f"{8 * rate / 1e6:.2f} Mb/s", f"{payload / 1e3:.0f}", f"{result / 1e3:.0f}"),
        *(f"{nbytes / 1e3:.0f}", f"{sockets / 1e3:.0f}", f"{(replicas - 1) * payload / 1e3:.0f}"),
        *(f"{ratio:.2f}" for ratio in cells),
    )


def table(quick: bool) -> Table:
    """Measure. Raises NotHere where links cannot be shaped."""
    if missing := Homes.missing():
        raise NotHere(missing)
    rounds = 1 if quick else 5
    sizes = (2, 4) if quick else (2, 4, 8, 16)
    return Table(
        "Reduction over equal lines",
        f"python -m benchmarks.reduction{' --quick' * quick}",
        (
            *("replicas", "line", "payload kB", "result kB", "reduced kB", "on sockets kB", "gathered kB"),
            *("ratio", "least", "largest"),
        ),
        tuple(asyncio.run(measure(replicas, rounds)) for replicas in sizes),
        (
            "Reduced: what a replica sends, and as much that it receives, by coordinator.ops.forecast. On "
            "sockets: the same with all that libp2p adds. Gathered: what it would receive by gathering. "
            f"Ratio: the time of a round to the {_SECONDS:.0f} s in which the line carries these bytes, "
            f"median, least and largest of {rounds}. TCP {CONGESTION_CONTROL}.",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 and 4 replicas")
    print(table(parser.parse_args().quick).markdown)


if __name__ == "__main__":
    main()
