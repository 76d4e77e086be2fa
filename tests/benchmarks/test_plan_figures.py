"""The figures of forecasts: a table and a chart each."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.plan_figures import scaling_figure, utilization


@pytest.mark.parametrize("figure", ["figure2", "figure3", "scaling"])
def test_figures_are_a_table_and_a_chart(tmp_path: Path, figure: str) -> None:
    files = scaling_figure(tmp_path, 8) if figure == "scaling" else utilization(figure, tmp_path, 8)
    assert files == (tmp_path / f"{figure}.csv", tmp_path / f"{figure}.png")
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    column = "efficiency" if figure == "scaling" else "utilization"
    assert rows
    assert all(0 < float(row[column]) <= 1 for row in rows)
    assert files[1].read_bytes().startswith(b"\x89PNG")
