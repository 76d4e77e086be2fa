"""The benchmark of the history writes one, and asks it everything that pages ask."""

from __future__ import annotations

from pathlib import Path

from benchmarks.history import measure


def test_every_query_has_an_answer_and_a_time(tmp_path: Path) -> None:
    found = measure(tmp_path, 8, 40)
    assert found.nbytes > 0
    assert found.slowest in found.query_seconds
