"""What ``make gpu`` runs on a card, at toy size on a CPU: the first person with a GPU gets a correct page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import parts, policies, whole
from benchmarks.gpu.setting import PARTS, Setting
from protocol.memory.needs import BY_PRICE

IN_ONE_PROCESS = [name for name in PARTS if hasattr(parts, f"measure_{name}")]


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_part_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    table, figures = getattr(parts, f"measure_{name}")(Setting("cpu", toy=True, folder=tmp_path))
    assert table.rows
    assert figures
    assert json.loads(json.dumps(figures)) is not None


def test_memory_is_measured_with_each_policy(tmp_path: Path) -> None:
    table, figures = policies.measure_memory(Setting("cpu", toy=True, folder=tmp_path))
    assert [row[0] for row in table.rows] == [*figures] == [str(policy) for policy in BY_PRICE]


@pytest.mark.swarm
def test_a_swarm_on_one_device_commits_all_rounds(tmp_path: Path) -> None:
    _, figures = whole.measure_swarm(Setting("cpu", toy=True, folder=tmp_path))
    assert figures["tokens"] > 0
    assert set(figures["losses"]) == {"replica 0", "replica 1"}


def test_a_part_that_fails_leaves_its_reason_on_the_page(tmp_path: Path) -> None:
    failed = driver.run_part("packing", "cuda:99", True, tmp_path)
    assert failed.outcome == "failed"
    assert "cuda" in driver.page([failed], "cpu").lower()
    driver.answer_part("packing", "cpu", True, tmp_path)
    answer = json.loads((tmp_path / "packing.part.json").read_text())
    assert answer["outcome"] == "measured"
    assert answer["figures"]["dither5"]["bytes"] > 0
