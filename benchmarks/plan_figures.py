"""Figures of what :mod:`coordinator.ops.forecast` predicts over a range: a CSV file and a chart for each.

python -m benchmarks.plan_figures figure2     # utilization of 70B against bandwidth, as in the paper
python -m benchmarks.plan_figures figure3     # the same of 512M: the paper's figure is at 1 Gb/s
python -m benchmarks.plan_figures scaling     # weak and strong scaling of 100 to 1000 nodes
python -m benchmarks.plan_figures scaling --embedding-every 10 --exchange reduced
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.sweeps import ScalingPoint, UtilizationPoint, scaling, utilization_against_bandwidth
from node.cli.plan import capacity
from node.extras import pyplot
from node.views.plan import payload_bytes
from protocol.run_files.resolve import resolve

_BANDWIDTHS = (10, 20, 30, 50, 70, 100, 200, 300, 500, 700, 1000, 2000, 3000, 5000, 7000, 10_000)
"""Mb/s."""
_NODES = range(100, 1001, 100)
_TFLOPS, _MICROBATCHES, _HOME_SHARE = 40.0, {"utilization": 256, "scaling": 64}, 0.8


def utilization(name: str, out: Path, microbatches: int = _MICROBATCHES["utilization"]) -> tuple[Path, Path]:
    """The figure `name`: pipelines of 4 members with 40 TFLOP/s each against the bandwidth of their lines."""
    preset, latency, pipelines, ratios = {
        "figure2": ("70b", 20.0, 2, (1, 8, 16, 32, 64, 100)),
        "figure3": ("512m", 5.0, 4, (1, 8, 24, 96, 192, 384, 768)),
    }[name]
    spec = resolve(
        preset, overrides={"inner.steps": 50, "swarm.stages": 4, "inner.microbatches": microbatches}
    )
    points = utilization_against_bandwidth(
        spec,
        payload_bytes(spec),
        capacity(1.0, 1.0, 2 * latency, math.inf, _TFLOPS),
        pipelines,
        [round(spec.model.width / ratio) for ratio in ratios],
        [1e6 * bandwidth for bandwidth in _BANDWIDTHS],
    )
    title = (
        f"{preset} in 4 stages, H 50: members of {_TFLOPS:g} TFLOP/s, {microbatches} microbatches of "
        f"{spec.inner.microbatch_size} x {spec.model.context} tokens, {latency:g} ms, {pipelines} pipelines"
    )
    return write_utilization(list(points), spec.model.width, out, name, title)


def scaling_figure(
    out: Path,
    microbatches: int = _MICROBATCHES["scaling"],
    embedding_every: int = 0,
    exchange: str = "gathered",
) -> tuple[Path, Path]:
    """The 1b model: homes with 50 Mb/s up in pipelines, a fifth of the nodes full replicas with 1 Gb/s."""
    settings = {"link.k": 32, "inner.steps": 50, "inner.microbatches": microbatches}
    spec = resolve("1b", overrides={**settings, "outer.exchange": exchange})
    points = scaling(
        spec,
        payload_bytes(spec),
        home=capacity(50.0, 200.0, 40.0, math.inf, _TFLOPS),
        datacenter=capacity(1000.0, 1000.0, 40.0, math.inf, 10 * _TFLOPS),
        home_share=_HOME_SHARE,
        nodes=_NODES,
        embedding_every=embedding_every,
    )
    title = (
        f"1b, H 50, k 32: {_HOME_SHARE:.0%} homes with 50 Mb/s up in pipelines of {spec.swarm.stages}, the "
        "others full replicas with 1000 Mb/s"
    )
    if embedding_every:
        title += f"; snapshots of the embedding every {embedding_every} rounds"
    if exchange == "reduced":
        title += "; payloads are reduced in parts"
    return write_scaling(list(points), out, title)


def write_utilization(
    points: Sequence[UtilizationPoint], width: int, folder: Path, name: str, title: str
) -> tuple[Path, Path]:
    """``NAME.csv`` and ``NAME.png`` of utilization against bandwidth, one line for every k of `width`."""
    table, chart = folder / f"{name}.csv", folder / f"{name}.png"
    figure, axes, plots = _chart()
    _write_csv(table, points)
    for k in dict.fromkeys(point.k for point in points):
        line = [point for point in points if point.k == k]
        axes.plot(
            [point.bandwidth / 1e6 for point in line],
            [100 * point.utilization for point in line],
            marker=".",
            label=f"k/d {_ratio(k, width)}",
        )
    bound = 100 * points[0].bound
    axes.axhline(bound, color="black", linestyle=":", label=f"links take no time ({bound:.1f} %)")
    axes.axhline(97, color="grey", linewidth=0.8, label="97 %")
    axes.set(xscale="log", ylim=(0, 101), xlabel="uplink and downlink of a member (Mb/s)")
    axes.set(ylabel="share of a round spent computing (%)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(chart, dpi=120)
    plots.close(figure)
    return table, chart


def write_scaling(points: Sequence[ScalingPoint], folder: Path, title: str) -> tuple[Path, Path]:
    """``scaling.csv`` and ``scaling.png``: tokens per second and efficiency against nodes."""
    table, chart = folder / "scaling.csv", folder / "scaling.png"
    figure, (left, right), plots = _chart(2)
    _write_csv(table, points)
    for kind in dict.fromkeys(point.kind for point in points):
        line = [point for point in points if point.kind == kind]
        nodes = [point.nodes for point in line]
        left.plot(nodes, [point.tokens_per_second / 1e6 for point in line], marker=".", label=kind)
        right.plot(nodes, [100 * point.efficiency for point in line], marker=".", label=kind)
        shares = [100 * point.outer_share for point in line]
        right.plot(nodes, shares, linestyle="--", label=f"{kind}: outer exchange")
    first = points[0]
    ends = (first.nodes, max(point.nodes for point in points))
    rate = first.tokens_per_second / first.nodes / 1e6
    left.plot(ends, [rate * each for each in ends], color="grey", linestyle=":", label="in proportion")
    left.set(xlabel="nodes", ylabel="million tokens per second", ylim=(0, None))
    right.set(xlabel="nodes", ylabel="efficiency per node; share of a round (%)", ylim=(0, 105))
    figure.suptitle(title, fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    right.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(chart, dpi=120)
    plots.close(figure)
    return table, chart


def _chart(columns: int = 1) -> tuple[Any, Any, Any]:
    plots = pyplot()
    return *plots.subplots(1, columns, figsize=(8 + 3 * (columns - 1), 5), layout="constrained"), plots


def _ratio(k: int, width: int) -> str:
    return "1" if k == width else f"1/{width / k:.0f}"


def _write_csv(file: Path, points: Sequence[UtilizationPoint] | Sequence[ScalingPoint]) -> None:
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.DictWriter(text, [field.name for field in fields(points[0])])
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=("figure2", "figure3", "scaling"))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--embedding-every", type=int, default=0)
    parser.add_argument("--exchange", default="gathered")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.figure == "scaling":
        files = scaling_figure(given.out, embedding_every=given.embedding_every, exchange=given.exchange)
    else:
        files = utilization(given.figure, given.out)
    print("written:", *files)


if __name__ == "__main__":
    main()
