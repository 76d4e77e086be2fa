"""What a case of :mod:`benchmarks.pipeline` has measured, and the tables of all cases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.table import Table

from benchmarks import tables

_COLUMNS = (
    *("members", "k/d", "link", "compute ms", "handling ms", "step s", "predicted", "alone", "live"),
    *("as computed", "busy %", "predicted %", "gain"),
)


_CLOSE = 0.15


@dataclass(frozen=True)
class Case:
    """One row: `k` 0 is uncompressed, `bandwidth` in bits per second, infinity unshaped."""

    members: int
    k: int
    bandwidth: float


@dataclass(frozen=True)
class Result:
    """The measurement of a case, or the median of its repetitions.

    Attributes:
        compute: seconds of one microbatch, by member, alone.
        handling: seconds of the processor that its main process takes for the messages of one microbatch.
        seconds: of one inner step.
        predicted: seconds of a step by the times of its live source.
        alone, live, as_computed: `seconds` / the prediction from each source; see the module.
        utilization: busy share of the step, by member.
        bytes_sent: by the first member in one step.
    """

    case: Case
    paced: bool
    compute: tuple[float, ...]
    handling: tuple[float, ...]
    seconds: float
    predicted: float
    alone: float
    live: float
    as_computed: float
    utilization: tuple[float, ...]
    predicted_utilization: tuple[float, ...]
    bytes_sent: float


def median_of(repetitions: Sequence[Result]) -> Result:
    """Each number is the median of the repetitions, which are of one case."""

    def median(name: str) -> Any:
        values = [getattr(each, name) for each in repetitions]
        if isinstance(values[0], tuple):
            return tuple(map(statistics.median, zip(*values, strict=True)))
        return statistics.median(values)

    first = repetitions[0]
    numbers = {each.name for each in fields(Result)} - {"case", "paced"}
    return replace(first, **{name: median(name) for name in numbers})


def table_of(results: Sequence[Result], width: int) -> Table:
    """One row per case."""
    table = Table(*_COLUMNS)
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows_of(results, width):
        table.add_row(*row)
    return table


def document_of(results: Sequence[Result], width: int, command: str) -> tables.Table:
    """The same table for the documentation."""
    return tables.Table(
        "Pipelines over slow links",
        command,
        _COLUMNS,
        tuple(map(tuple, rows_of(results, width))),
        (f"{summary_of(results)}.",),
    )


def rows_of(results: Sequence[Result], width: int) -> Iterator[list[str]]:
    """The cells of the table, row by row."""
    uncompressed = {
        (each.case.members, each.case.bandwidth): each.seconds for each in results if each.case.k == 0
    }
    for each in results:
        case = each.case
        base = uncompressed.get((case.members, case.bandwidth))
        pace = " paced" if each.paced else ""
        yield [
            f"{case.members}{pace}",
            f"1/{width // case.k}" if case.k not in (0, width) else ("1" if case.k else "uncompressed"),
            "unshaped" if math.isinf(case.bandwidth) else f"{case.bandwidth / 1e6:.0f} Mb/s",
            " ".join(f"{1000 * seconds:.0f}" for seconds in each.compute),
            " ".join(f"{1000 * seconds:.1f}" for seconds in each.handling),
            f"{each.seconds:.2f}",
            f"{each.predicted:.2f}",
            f"{each.alone:.2f}",
            f"{each.live:.2f}",
            f"{each.as_computed:.2f}",
            " ".join(f"{100 * share:.0f}" for share in each.utilization),
            " ".join(f"{100 * share:.0f}" for share in each.predicted_utilization),
            f"{base / each.seconds:.2f}x" if base and case.k else "",
        ]


def summary_of(results: Sequence[Result]) -> str:
    """The difference of prediction and measurement by source, in a sentence."""
    sources = {"live": "live figures", "alone": "those measured alone", "as_computed": "those of the step"}
    found = []
    for name, source in sources.items():
        off = [abs(getattr(each, name) - 1) for each in results]
        within = sum(each <= _CLOSE for each in off)
        found.append(
            f"{within} of {len(off)} steps within {100 * _CLOSE:.0f} % of the prediction from {source} "
            f"(median deviation {100 * statistics.median(off):.1f} %, largest {100 * max(off):.1f} %)"
        )
    return "; ".join(found)
