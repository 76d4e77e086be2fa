"""A worker opens only the files that its owner has named, and takes no more memory than there is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.ipc.worker_calls import Build, CheckDevice, ComputeOptions, LocalData, MeasureSpeed
from node.machine.machine import OwnMachine
from node.worker.process import NodeWorker
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.types import StageRange


def test_a_worker_refuses_a_path_that_only_the_run_names(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret.txt")  # who reads the pipe waits for ever
    spec = resolve("nano", overrides={"data.source": f"text:{tmp_path / 'secret.txt'}"})
    with pytest.raises(HetnodeError) as caught:
        NodeWorker().build(Build(spec, StageRange(0, 1), LocalData()))
    assert caught.value.code is ErrorCode.DATA_NOT_NAMED
    assert "--data" in caught.value.remedy


HUGE = {"model.width": 2**15, "model.feed_forward": 2**18, "model.layers": 512, "model.heads": 256}
"""Specifications that are valid, and could take any machine's memory."""
LONG = {"model.context": 2**17, "inner.microbatch_size": 4096}
MANY = {"model.vocabulary": 2**20, "model.width": 2**15, "model.heads": 256, "link.k": 8}


@pytest.mark.parametrize("settings", [HUGE, LONG, MANY])
@pytest.mark.parametrize("stages", [StageRange(0, 2), StageRange(0, 1), StageRange(1, 2)])
def test_a_worker_allocates_nothing_of_stages_that_cannot_fit(
    settings: dict[str, Any], stages: StageRange
) -> None:
    spec, before = resolve("tiny", overrides=settings), psutil.Process().memory_info().vms
    with pytest.raises(HetnodeError) as caught:
        NodeWorker().build(Build(spec, stages, LocalData()))
    assert caught.value.code is ErrorCode.DEVICE_UNAVAILABLE
    assert psutil.Process().memory_info().vms - before < 2**30


@pytest.mark.parametrize("settings", [HUGE, LONG])
def test_a_worker_measures_no_layers_that_cannot_fit(settings: dict[str, Any]) -> None:
    spec = resolve("tiny", overrides=settings)
    with pytest.raises(HetnodeError) as caught:
        OwnMachine().measure_speed(MeasureSpeed(spec, "cpu", 0.1))
    assert caught.value.code is ErrorCode.DEVICE_UNAVAILABLE


def test_the_limit_of_the_owner_holds_for_the_measurement(tmp_path: Path) -> None:
    machine, spec = OwnMachine(), resolve("tiny")
    machine.check_device(CheckDevice(ComputeOptions("cpu", memory_limit=10**6)))
    with pytest.raises(HetnodeError, match=r"0\.001 GB are free"):
        machine.measure_speed(MeasureSpeed(spec, "cpu", 0.1))
