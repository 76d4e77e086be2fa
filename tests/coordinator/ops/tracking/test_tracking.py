"""Figures reach the real TensorBoard from a process of their own, once each, also across restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from coordinator.ops.tracking.tools import Tool
from coordinator.ops.tracking.tracking import Tracking
from coordinator.store.metrics import MetricsFile
from protocol.status import Measurement
from tests.builders import keyed

A = keyed(0)


def measure(metrics: MetricsFile, round_number: int, loss: float) -> None:
    told = Measurement(A.peer, round_number, 0, 0, train_loss=loss, complete=True)
    metrics.record_measurement(1000.0 + round_number, told)


def in_files(folder: Path) -> list[tuple[int, float, float]]:
    """Round, loss and time of each loss that TensorBoard reads."""
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    points = found.Tensors("train_loss/replica-0")
    return [(each.step, float(make_ndarray(each.tensor_proto)), each.wall_time) for each in points]


def test_figures_are_sent_once_and_what_fails_costs_the_run_nothing(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        measure(metrics, 1, 3.5)
        with Tracking(tmp_path, Tool.TENSORBOARD) as tracking:
            tracking.start("run")
            measure(metrics, 2, 3.25)
        assert in_files(tmp_path) == [(1, 3.5, 1001.0), (2, 3.25, 1002.0)]
        measure(metrics, 3, 3.0)
        (tmp_path / "tensorboard").rename(tmp_path / "former")
        (tmp_path / "tensorboard").write_text("no folder")
        with Tracking(tmp_path, Tool.TENSORBOARD) as tracking:
            tracking.start("run")
        (tmp_path / "tensorboard").unlink()
        with Tracking(tmp_path, Tool.TENSORBOARD) as tracking:
            tracking.start("run")
        assert in_files(tmp_path) == [(3, 3.0, 1003.0)]


def test_without_a_tool_nothing_is_started(tmp_path: Path) -> None:
    with Tracking(tmp_path, None) as tracking:
        tracking.start("run")
    assert not [*tmp_path.iterdir()]


def test_neither_the_coordinator_nor_its_follower_imports_torch() -> None:
    code = (
        "import sys, coordinator.ops.tracking.tracking, coordinator.ops.tracking.follower\n"
        "libraries = {'torch', 'tensorboard', 'wandb', 'trackio'} & set(sys.modules)\n"
        "from tensorboard.summary import Writer\n"
        "sys.exit(bool(libraries or 'torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
