"""The metrics file: whole lines only, whatever became of the process that wrote before."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.metrics import MetricsFile, newest_measurements
from protocol.status import Measurement
from protocol.types import PeerId

WHOLE = '{"time": 1.0, "event": "first", "name": "Zoë"}\n'


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    "half", ["", "{", '{"time": 2.0, "event": "pe', "2" * 100_000], ids=["no", "short", "usual", "long"]
)
@pytest.mark.parametrize("whole", ["", WHOLE, 2 * WHOLE], ids=["none", "one", "two"])
def test_an_incomplete_last_line_is_removed(tmp_path: Path, whole: str, half: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole + half, "utf-8")
    with MetricsFile(path) as metrics:
        assert path.read_text("utf-8") == whole, "a concurrent reader sees whole lines"
        metrics.write(3.0, "next", {"loss": float("nan"), "rounds": 7})
        last = {"time": 3.0, "event": "next", "loss": None, "rounds": 7}
        assert lines(path) == [*map(json.loads, whole.splitlines()), last]


def test_half_a_letter_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes((WHOLE + '{"name": "Zoë').encode()[:-1])
    with MetricsFile(path) as metrics:
        metrics.write(2.0, "next", {})
    assert [line["event"] for line in lines(path)] == ["first", "next"]


def test_a_file_is_made_where_there_is_none(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(1.0, "first", {})
    assert lines(tmp_path / "metrics.jsonl") == [{"time": 1.0, "event": "first"}]


def test_the_newest_measurements_are_those_of_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for number in range(1, 6):
            file.record_measurement(1.0, Measurement(PeerId("a"), number, 0, 0))
            if number == 3:
                middle = file.size
        path.write_bytes(path.read_bytes() + b'{"event": "measurement"')  # not within the size
        assert [each.round_number for each in newest_measurements(path, file.size)] == [1, 2, 3, 4, 5]
        # The line in whose middle the part begins is left out.
        monkeypatch.setattr("coordinator.store.metrics.NEWEST_BYTES", file.size - middle + 10)
        assert [each.round_number for each in newest_measurements(path, file.size)] == [4, 5]


def test_a_line_that_a_full_disk_does_not_take_whole_leaves_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(file) as metrics:
        metrics.write(1.0, "first", {})
        whole = file.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, hard[1]))
        try:
            metrics.write(2.0, "lost", {})
            assert file.read_bytes() == whole
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, hard)
        metrics.write(3.0, "third", {})
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["first", "third"]
