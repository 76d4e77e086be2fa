"""A worker opens only the files that its own node's owner has named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node.core.worker.worker import Worker
from node.ipc.worker_calls import Build, LocalData
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.types import StageRange


def test_a_worker_refuses_a_path_that_only_the_run_names(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret.txt")  # who reads the pipe waits for ever
    spec = resolve("nano", overrides={"data.source": f"text:{tmp_path / 'secret.txt'}"})
    with pytest.raises(HetnodeError) as caught:
        Worker().build(Build(spec, StageRange(0, 1), LocalData()))
    assert caught.value.code is ErrorCode.DATA_NOT_NAMED
    assert "--data" in caught.value.remedy
