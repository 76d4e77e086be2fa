"""The memory that is really free: of the machine, and of the container that this process is in."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from node.measure import hardware
from node.measure.hardware import free_memory, measure_capacity

GIB = 2**30
BESIDE = GIB // 2
"""What the processes of a node need beside its stages."""


@pytest.fixture(autouse=True)
def _machine_with_64_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 64 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


def group(folder: Path, limit: str, used: int, cached: int, kind: int = 2) -> None:
    names = (
        ("memory.max", "memory.current") if kind == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{text}\n")
    inactive = "inactive_file" if kind == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon {used}\n{inactive} {cached}\n")


def own(folder: Path, *lines: str) -> Path:
    file = folder / "own"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_without_a_container_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path / "no such file") == 64 * GIB - BESIDE
    group(tmp_path, "max", 5 * GIB, 0)
    assert free_memory(tmp_path, own(tmp_path, "0::/")) == 64 * GIB - BESIDE


def test_the_limit_of_a_container_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    group(tmp_path, str(8 * GIB), 5 * GIB, GIB)
    assert free_memory(tmp_path, own(tmp_path, "0::/")) == 4 * GIB - BESIDE


def test_the_narrowest_limit_of_all_parents_counts(tmp_path: Path) -> None:
    group(tmp_path / "user", str(4 * GIB), GIB, 0)
    group(tmp_path / "user" / "node", str(16 * GIB), GIB, 0)
    assert free_memory(tmp_path, own(tmp_path, "0::/user/node")) == 3 * GIB - BESIDE


def test_the_limit_of_the_first_version_of_cgroups_counts(tmp_path: Path) -> None:
    group(tmp_path / "memory", str(2 * GIB), GIB, 0, kind=1)
    lines = "5:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "0::/"  # the own path is not visible inside
    assert free_memory(tmp_path, own(tmp_path, *lines)) == GIB - BESIDE


def test_a_machine_that_is_full_has_known_memory(tmp_path: Path) -> None:
    group(tmp_path, str(GIB), GIB, 0)
    assert free_memory(tmp_path, own(tmp_path, "0::/")) == 1  # 0 would mean that nothing is known


def test_a_gpu_has_memory_of_its_own_unless_it_shares_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "free_memory", lambda: 7)
    assert measure_capacity("cuda:1", 2, 80 * GIB).memory_bytes == 80 * GIB
    assert measure_capacity("mps", 2, 80 * GIB).memory_bytes == 7
    assert measure_capacity("cpu", 2).memory_bytes == 7
