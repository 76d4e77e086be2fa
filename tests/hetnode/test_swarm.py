"""A swarm of real processes, as a notebook starts it: within an event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

import hetnode
from hetnode import ErrorCode, HetnodeError
from tests.support.examples_of_docs import notebook
from tests.support.waiting import wait_until

pytestmark = pytest.mark.swarm


def has_no_process(folder: Path) -> bool:
    """Whether no process has a file of `folder` open, as each has its log."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [file.path for file in process.open_files() if str(folder) in file.path]
        except psutil.Error:
            continue
    return not found


@pytest.mark.slow
async def test_the_program_of_the_documents_trains_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("".join(notebook()), names)
    assert asyncio.get_running_loop().is_running()
    assert "of 3: val. loss replica 0" in capsys.readouterr().out
    assert names["swarm"].round_number == 3
    wait_until(lambda: has_no_process(tmp_path), 30, "its processes to be gone")
    assert len(names["history"]) == 8
    assert names["logits"].shape == (1, 4, names["model"].spec.model.vocabulary)


@pytest.mark.slow
def test_an_exception_ends_every_process(tmp_path: Path) -> None:
    swarm = hetnode.local_swarm("nano", tmp_path, settings={"rounds": 1000})

    def cell() -> None:
        with swarm:
            swarm.wait(1)
            assert not has_no_process(tmp_path)
            raise KeyError

    with pytest.raises(KeyError):
        cell()
    assert swarm.status is not None
    wait_until(lambda: has_no_process(tmp_path), 30, "its processes to be gone")
    with pytest.raises(HetnodeError, match="has ended after round") as caught:
        swarm.wait(999)
    assert caught.value.code is ErrorCode.BAD_OPTION


def test_a_block_that_ends_at_once_leaves_nothing(tmp_path: Path) -> None:
    with hetnode.local_swarm("nano", tmp_path / "run") as swarm:
        assert repr(swarm) == "round 0 of 3: val. loss not known yet"
        with pytest.raises(TimeoutError, match="round 0 of 3"):
            swarm.wait(1, timeout=0.0)
    wait_until(lambda: has_no_process(tmp_path), 30, "its processes to be gone")
    with pytest.raises(HetnodeError) as caught:
        hetnode.local_swarm("nano", tmp_path / "run")
    assert caught.value.code is ErrorCode.RUN_FOLDER_IN_USE
