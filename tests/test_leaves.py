"""A leaf can be removed: without its folders, and with the lines that register it changed, the core works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("protocol", "coordinator", "node", "hetnode", "tests", "benchmarks", "docs")
FEW = ("tests/coordinator/run/rounds/test_rounds.py", "tests/virtual/test_exchange.py")
CORE_TESTS = (
    "tests/protocol/math",
    "tests/protocol/codec",
    "tests/coordinator/run",
    "tests/node/core",
    "tests/virtual/test_exchange.py",
)
WITHOUT = "not enumerative and not dither"
"""Cases of the core's tests with a format of a leaf."""
IMPORT_ALL_AND_TEST = """
import importlib, pkgutil, sys
for name in ("protocol", "coordinator", "node", "hetnode"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Leaf:
    """The folders of a leaf, and by file the line that registers it and the line that stands in for it.

    Of a file with `entries`, the lines that contain that text go."""

    folders: tuple[str, ...]
    lines: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)


LEAVES = {
    "formats": Leaf(("protocol/formats",), entries={"protocol/spec/quantizers.py": "{_LEAF}."}),
    "dashboard": Leaf(
        ("coordinator/ops/dashboard",),
        {
            "coordinator/app.py": (
                "from coordinator.ops.dashboard.dashboard import Dashboard",
                "from coordinator.api.dashboard import NoDashboard as Dashboard",
            )
        },
    ),
    "explain": Leaf(
        ("coordinator/ops/explain",),
        {
            "coordinator/app.py": (
                "from coordinator.ops.explain.explainer import Explainer",
                "from coordinator.api.explaining import NoExplainer as Explainer",
            )
        },
    ),
    "snapshots": Leaf(
        ("node/snapshots",),
        {
            "node/runtime.py": (
                "from node.snapshots.embedding_snapshots import EmbeddingSnapshots",
                "EmbeddingSnapshots: Any = None",
            ),
            "node/worker/process.py": (
                "from node.snapshots.snapshot_calls import SnapshotCalls",
                "SnapshotCalls: Any = lambda worker: None",
            ),
        },
    ),
    "relay": Leaf(
        ("protocol/relay", "coordinator/ops/relay", "node/home/relay"),
        {
            "coordinator/app.py": (
                "from coordinator.ops.relay.own_relay import open_relay",
                "from coordinator.api.relay import no_relay as open_relay",
            ),
            "node/runtime.py": (
                "from node.home.relay.relayed import RelayedNode",
                "from node.net.reach import DirectReach as RelayedNode",
            ),
        },
    ),
}


@pytest.mark.parametrize("tests", [FEW, pytest.param(CORE_TESTS, marks=pytest.mark.slow)], ids=["few", "all"])
def test_the_core_works_without_leaves(tests: Sequence[str], tmp_path: Path) -> None:
    """All at once, because each copy is imported as a whole."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)  # with what is compiled, which Python checks
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for leaf in LEAVES.values():
        for folder in leaf.folders:
            shutil.rmtree(tmp_path / folder)
            shutil.rmtree(tmp_path / "tests" / folder, ignore_errors=True)
        for file, (registered, instead) in leaf.lines.items():
            text = (tmp_path / file).read_text()
            assert text.count(registered) == 1
            (tmp_path / file).write_text(text.replace(registered, instead))
        for file, entry in leaf.entries.items():
            kept = (line for line in (ROOT / file).read_text().splitlines(keepends=True) if entry not in line)
            (tmp_path / file).write_text("".join(kept))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", IMPORT_ALL_AND_TEST, "-q", "-n", "0", "-k", WITHOUT, *tests]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()[-3000:]
