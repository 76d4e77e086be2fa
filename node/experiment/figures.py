"""The figures of a report: small PNGs with a white ground, which read well on paper, too."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from node.experiment.comparison import MEAN, deltas_of, losses_of
from node.experiment.matrix import Matrix, Row, Table, fraction_of
from node.experiment.results import Result
from node.experiment.trial import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    Mode.SPARSELOCO: "#444444",
    Mode.HETEROGENEOUS: "#0072b2",
    Mode.UNIFORM: "#d55e00",
    Mode.DATA_PARALLEL: "#009e73",
}
"""Told apart also by those who do not see all colours (Okabe and Ito)."""
_MARKERS = "ox^svD"
_LEAST_BARS = 3
"""Fewer are as well read in the table."""


@dataclass(frozen=True)
class Figure:
    """A figure on the disk.

    Attributes:
        table: the name of the table under which it belongs; None where it belongs to all.
        caption: a sentence, for those who do not see it.
    """

    path: Path
    caption: str
    table: str | None


def draw_figures(matrix: Matrix, results: Mapping[str, Result], folder: Path) -> list[Figure]:
    """Draw what there are results for into `folder`: PNG files, below 60 kB each."""
    figures = []
    for table in matrix.tables:
        if table.orderings and len({row.k for row in table.rows if row.k is not None}) > 1:
            figures += _drawn(
                folder / f"{table.name}-loss.png",
                f"Validation loss by k/d: {table.title}.",
                table.name,
                partial(_losses_by_k, table=table, seeds=matrix.seeds, results=results),
            )
            figures += _drawn(
                folder / f"{table.name}-training.png",
                f"Training loss by inner step: {table.title}.",
                table.name,
                partial(_training, table=table, seeds=matrix.seeds, results=results),
            )
    for table in matrix.tables:
        bars = sum(1 for row in table.rows if deltas_of(table, row, matrix.seeds, results))
        if bars >= _LEAST_BARS:
            figures += _drawn(
                folder / f"{table.name}-delta.png",
                f"Loss against the baseline, in percent: {table.title}.",
                table.name,
                partial(_deltas, table=table, seeds=matrix.seeds, results=results),
                height=1.1 + 0.32 * bars,
            )
    return figures


def _drawn(
    path: Path, caption: str, table: str, draw: Callable[[Axes], bool], height: float = 4.2
) -> list[Figure]:
    """The figure, where there was anything to draw."""
    import matplotlib  # noqa: PLC0415 - a second of start-up that other commands need not pay

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415 - which matplotlib itself draws PNGs with

    figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained", facecolor="white")
    try:
        if not draw(axes):
            path.unlink(missing_ok=True)
            return []
        axes.spines[["top", "right"]].set_visible(False)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=100)
    finally:
        pyplot.close(figure)
    # A palette takes a third of the bytes. No date and no version is kept: equal results give equal files.
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
    return [Figure(path, caption, table)]


def _losses_by_k(axes: Axes, table: Table, seeds: Sequence[int], results: Mapping[str, Result]) -> bool:
    """Lines of the means over seeds, a mark for every seed, and the baseline as a horizontal line."""
    drawn = False
    for mode in (Mode.UNIFORM, Mode.HETEROGENEOUS):
        points = [(row, losses_of(row, results)) for row in _by_k(table, mode)]
        means = [(row.k / row.width, losses[MEAN]) for row, losses in points if row.k and MEAN in losses]
        if means:
            axes.plot(
                *zip(*means, strict=True), color=_COLOURS[mode], linewidth=2, label=f"{mode.value}, mean"
            )
        for number, seed in enumerate(seeds):
            at = [(row.k / row.width, losses[seed]) for row, losses in points if row.k and seed in losses]
            if at:
                marker = _MARKERS[number % len(_MARKERS)]
                axes.plot(*zip(*at, strict=True), linestyle="", marker=marker, markersize=7, fillstyle="none",
                          color=_COLOURS[mode], label=f"{mode.value}, seed {seed}")  # fmt: skip
                drawn = True
    for row in table.rows:
        losses = losses_of(row, results)
        if row.mode is Mode.SPARSELOCO and losses:
            level = losses.get(MEAN, next(iter(losses.values())))
            axes.axhline(level, color=_COLOURS[row.mode], linestyle="--", label="no link compression")
    if not drawn:
        return False
    widths = sorted({(row.k, row.width) for row in table.rows if row.k})
    axes.set_xscale("log", base=2)
    axes.set_xticks([k / width for k, width in widths], [fraction_of(k, width) for k, width in widths])
    axes.minorticks_off()
    axes.set(xlabel="k/d, share of the width that links carry", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return True


def _training(axes: Axes, table: Table, seeds: Sequence[int], results: Mapping[str, Result]) -> bool:
    """Of the baseline, and of both other modes at their widest and narrowest links; the mean over seeds."""
    chosen = [row for row in table.rows if row.mode is Mode.SPARSELOCO][:1]
    for mode in (Mode.HETEROGENEOUS, Mode.UNIFORM):
        rows = _by_k(table, mode)
        chosen += rows[-1:] + rows[:1] if len(rows) > 1 else rows
    drawn = False
    for row in chosen:
        curves = [results[row.trials[seed].trial.key].train for seed in seeds
                  if row.trials[seed].trial.key in results]  # fmt: skip
        if curves:
            rounds = range(1, 1 + min(map(len, curves)))
            means = [
                sum(math.nan if (loss := c[r - 1]) is None else loss for c in curves) / len(curves)
                for r in rounds
            ]
            narrow = row.k is not None and row.k == min(each.k or row.k for each in _by_k(table, row.mode))
            axes.plot([r * row.steps_per_round for r in rounds], means, color=_COLOURS[row.mode],
                      linestyle=":" if narrow else "-", linewidth=1.6, label=row.name)  # fmt: skip
            drawn = True
    axes.set(xlabel="inner step", ylabel="training loss (nats per token)")
    axes.set_ylim(top=axes.get_ylim()[0] + 0.6 * (axes.get_ylim()[1] - axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(fontsize=8)
    return drawn


def _deltas(axes: Axes, table: Table, seeds: Sequence[int], results: Mapping[str, Result]) -> bool:
    """A bar for the mean over seeds, and a mark for every seed."""
    rows = [row for row in table.rows if deltas_of(table, row, seeds, results)]
    for place, row in enumerate(rows):
        deltas = deltas_of(table, row, seeds, results)
        axes.barh(place, sum(deltas.values()) / len(deltas), color=_COLOURS[row.mode], alpha=0.55, height=0.6)
        for number, (_, delta) in enumerate(deltas.items()):
            axes.plot(delta, place, marker=_MARKERS[number % len(_MARKERS)], color="black", markersize=5,
                      fillstyle="none", linestyle="")  # fmt: skip
    several = len({row.baseline for row in rows}) > 1
    axes.set_yticks(
        range(len(rows)), [f"{row.name} (over {row.baseline})" if several else row.name for row in rows]
    )
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    against = "its baseline" if several or not rows else rows[0].baseline
    axes.set(xlabel=f"loss over that of {against} (%); bar: mean, marks: seeds")
    axes.grid(alpha=0.3, axis="x")
    return bool(rows)


def _by_k(table: Table, mode: Mode) -> list[Row]:
    """Rows of `mode`, the narrowest first."""
    rows = [row for row in table.rows if row.mode is mode and row.k is not None]
    return sorted(rows, key=lambda row: row.k or 0)
