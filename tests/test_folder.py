"""A node's folder belongs to one node at a time, and to one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.folder import locked, settle_in
from protocol.errors import ErrorCode, HetnodeError


def test_a_second_node_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(HetnodeError) as refused:
            locked(tmp_path)
        assert refused.value.code is ErrorCode.RUN_FOLDER_IN_USE
    locked(tmp_path).close()


def test_what_is_kept_stays_for_the_same_run(tmp_path: Path) -> None:
    settle_in(tmp_path, "nano-1", "coordinator")
    (tmp_path / "checkpoint").mkdir()
    settle_in(tmp_path, "nano-1", "coordinator")
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(("run", "coordinator"), [("nano-2", "coordinator"), ("nano-1", "another")])
def test_what_is_kept_of_another_run_is_set_aside_and_not_deleted(
    tmp_path: Path, run: str, coordinator: str
) -> None:
    settle_in(tmp_path, "nano-1", "coordinator")
    for kept in ("checkpoint", "payloads"):
        (tmp_path / kept).mkdir()
        (tmp_path / kept / "file").write_text("precious")
    settle_in(tmp_path, run, coordinator)
    assert not (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "payloads").exists()
    assert (tmp_path / "former-1" / "checkpoint" / "file").read_text() == "precious"
    settle_in(tmp_path, "nano-1", "coordinator")
    assert (tmp_path / "former-2").exists()
