"""The figures of a report: small PNG files on white."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from node.experiment.comparison import MEAN, deltas_of, losses_of
from node.experiment.matrix import Matrix, MatrixRow, Table, fraction_of
from node.experiment.results import Result, mean
from node.experiment.trial import Mode
from node.extras import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    Mode.SPARSELOCO: "#444444",
    Mode.HETEROGENEOUS: "#0072b2",
    Mode.UNIFORM: "#d55e00",
    Mode.DATA_PARALLEL: "#009e73",
}
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
_MARKERS = "ox^svD"
_LEAST_BARS = 3
"""The table is enough for fewer bars."""


@dataclass(frozen=True)
class Figure:
    """A figure on the disk. `table` is the name of its table, `caption` its text alternative."""

    path: Path
    caption: str
    table: str


Draw = Callable[["Axes", Table, Sequence[int], Mapping[str, Result]], bool]
"""Draws on the axes; False if there is nothing to draw."""


def draw_figures(matrix: Matrix, results: Mapping[str, Result], folder: Path) -> list[Figure]:
    """Draw the figures for which there are results into `folder`: PNG files below 60 kB.

    Raises HetnodeError MISSING_EXTRA.
    """
    figures: list[Figure] = []

    def draw(table: Table, name: str, caption: str, content: Draw, height: float = 4.2) -> None:
        path = folder / f"{table.name}-{name}.png"
        if _written(path, height, lambda axes: content(axes, table, matrix.seeds, results)):
            figures.append(Figure(path, f"{caption}: {table.section.title}.", table.name))

    for table in matrix.tables:
        if table.section.orderings and len({row.k for row in table.rows if row.k is not None}) > 1:
            draw(table, "loss", "Validation loss by k/d", _losses_by_k)
            draw(table, "training", "Training loss by inner step", _training)
    for table in matrix.tables:
        bars = sum(1 for row in table.rows if deltas_of(table, row, matrix.seeds, results))
        if bars >= _LEAST_BARS:
            draw(table, "delta", "Loss against the baseline, in percent", _deltas, 1.1 + 0.32 * bars)
    return figures


def _written(path: Path, height: float, draw: Callable[[Axes], bool]) -> bool:
    """Write the figure to `path`. If there is nothing to draw, remove the file and return False."""
    plots = pyplot()
    from PIL import Image  # noqa: PLC0415 - a dependency of matplotlib

    figure, axes = plots.subplots(figsize=(7.2, height), layout="constrained", facecolor="white")
    try:
        if not draw(axes):
            path.unlink(missing_ok=True)
            return False
        axes.spines[["top", "right"]].set_visible(False)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=100)
    finally:
        plots.close(figure)
    # A palette takes a third of the bytes. Without date and version, equal results give equal files.
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
    return True


def _losses_by_k(axes: Axes, table: Table, seeds: Sequence[int], results: Mapping[str, Result]) -> bool:
    """Means over seeds as lines, seeds as marks, the baseline as a horizontal line."""
    drawn = False
    for mode in (Mode.UNIFORM, Mode.HETEROGENEOUS):
        points = [(row, losses_of(row, results)) for row in _by_k(table, mode)]
        means = [(row.k / row.width, losses[MEAN]) for row, losses in points if row.k and MEAN in losses]
        if means:
            axes.plot(
                *zip(*means, strict=True), color=_COLOURS[mode], linewidth=2, label=f"{mode.value}, mean"
            )
        for marker, seed in zip(cycle(_MARKERS), seeds, strict=False):
            at = [(row.k / row.width, losses[seed]) for row, losses in points if row.k and seed in losses]
            if at:
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
    """Means over seeds: the baseline, and the other modes with their largest and smallest k."""
    chosen = [row for row in table.rows if row.mode is Mode.SPARSELOCO][:1]
    for mode in (Mode.HETEROGENEOUS, Mode.UNIFORM):
        rows = _by_k(table, mode)
        chosen += rows[-1:] + rows[:1] if len(rows) > 1 else rows
    drawn = False
    for row in chosen:
        curves = [results[row.trials[seed].trial.key].train for seed in seeds
                  if row.trials[seed].trial.key in results]  # fmt: skip
        if curves:
            means = [mean(losses) for losses in zip(*curves, strict=False)]  # up to the end of the shortest
            steps = [row.steps_per_round * round_number for round_number in range(1, len(means) + 1)]
            narrow = row.k is not None and row.k == min(each.k or row.k for each in _by_k(table, row.mode))
            axes.plot(steps, means, color=_COLOURS[row.mode],
                      linestyle=":" if narrow else "-", linewidth=1.6, label=row.name)  # fmt: skip
            drawn = True
    axes.set(xlabel="inner step", ylabel="training loss (nats per token)")
    axes.set_ylim(top=axes.get_ylim()[0] + 0.6 * (axes.get_ylim()[1] - axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(fontsize=8)
    return drawn


def _deltas(axes: Axes, table: Table, seeds: Sequence[int], results: Mapping[str, Result]) -> bool:
    """Means over seeds as bars, seeds as marks."""
    rows = [row for row in table.rows if deltas_of(table, row, seeds, results)]
    for place, row in enumerate(rows):
        deltas = deltas_of(table, row, seeds, results)
        axes.barh(place, sum(deltas.values()) / len(deltas), color=_COLOURS[row.mode], alpha=0.55, height=0.6)
        for marker, delta in zip(cycle(_MARKERS), deltas.values(), strict=False):
            axes.plot(
                delta, place, marker=marker, color="black", markersize=5, fillstyle="none", linestyle=""
            )
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


def _by_k(table: Table, mode: Mode) -> list[MatrixRow]:
    """Rows of `mode`, the smallest k first."""
    rows = [row for row in table.rows if row.mode is mode and row.k is not None]
    return sorted(rows, key=lambda row: row.k or 0)
