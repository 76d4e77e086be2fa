"""Copies of rounds are like rounds that were written."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.history import fill

PEERS, ROUNDS = 8, 40
FIGURES_OF_A_ROUND = ("estimates", "measurements", "replica_rounds", "round_figures")
"""In these the benchmark makes up other figures for each round."""


def rows_of(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    with closing(sqlite3.connect(path)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(db.execute(f"SELECT * FROM {name}"), key=repr) for name in tables}


def test_copies_have_the_rows_of_rounds_that_went_through_the_writer(tmp_path: Path) -> None:
    fill(tmp_path / "written", PEERS, ROUNDS, ROUNDS)
    fill(tmp_path / "copied", PEERS, ROUNDS, ROUNDS // 2)
    written, copied = rows_of(tmp_path / "written"), rows_of(tmp_path / "copied")
    assert {name: len(rows) for name, rows in written.items()} == {n: len(rows) for n, rows in copied.items()}
    for name in ("plans", "stage_rounds", "contributions"):
        assert written[name] == copied[name], name
    for name in FIGURES_OF_A_ROUND:
        assert [row[:2] for row in written[name]] == [row[:2] for row in copied[name]], name
