"""What lies in a node's folder is of one run, and of the stages that the node has."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.folder import keep_only_run, keep_only_stages, node_folder_of, run_in
from protocol.types import StageRange


def test_what_is_kept_stays_for_the_same_run(tmp_path: Path) -> None:
    keep_only_run(tmp_path, "nano-1", "coordinator")
    (tmp_path / "checkpoint").mkdir()
    keep_only_run(tmp_path, "nano-1", "coordinator")
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(("run", "coordinator"), [("nano-2", "coordinator"), ("nano-1", "another")])
def test_what_is_kept_of_another_run_is_set_aside_and_not_deleted(
    tmp_path: Path, run: str, coordinator: str
) -> None:
    keep_only_run(tmp_path, "nano-1", "coordinator")
    for kept in ("checkpoint", "payloads"):
        (tmp_path / kept).mkdir()
        (tmp_path / kept / "file").write_text("precious")
    keep_only_run(tmp_path, run, coordinator)
    assert not (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "payloads").exists()
    assert (tmp_path / "former-1" / "checkpoint" / "file").read_text() == "precious"
    keep_only_run(tmp_path, "nano-1", "coordinator")
    assert (tmp_path / "former-2").exists()


def test_of_other_stages_the_last_two_are_kept(tmp_path: Path) -> None:
    for first in (0, 1, 2, 3, 0, 1):
        stages = StageRange(first, first + 1)
        keep_only_stages(tmp_path, stages)
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        (tmp_path / "checkpoint" / str(stages)).write_text("")
    assert {path.name for path in tmp_path.glob("stages-*")} == {"stages-3", "stages-0"}
    keep_only_stages(tmp_path, StageRange(3, 4))
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["3"]
    assert {path.name for path in tmp_path.glob("stages-*")} == {"stages-0", "stages-1"}


def test_where_some_stages_stay_what_is_kept_stays(tmp_path: Path) -> None:
    keep_only_stages(tmp_path, StageRange(0, 2))
    (tmp_path / "checkpoint").mkdir()
    for stages in (StageRange(1, 4), StageRange(2, 3)):
        keep_only_stages(tmp_path, stages)
        assert (tmp_path / "checkpoint").exists()
    keep_only_stages(tmp_path, StageRange(0, 2))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("left", ["", "0-", "\x00\x00"])
def test_what_a_crash_has_left_of_a_mark_stops_no_start(tmp_path: Path, left: str) -> None:
    for name in ("run", "stages", "node-folder"):
        (tmp_path / name).write_text(left if name == "stages" else "")
    assert keep_only_run(tmp_path, "tiny-1", "a") == tmp_path
    keep_only_stages(tmp_path, StageRange(0, 2))
    assert run_in(tmp_path) == "tiny-1"
    assert node_folder_of(tmp_path) is None
    assert (tmp_path / "stages").read_text() == str(StageRange(0, 2))
