"""The newest round of which a place has all stages, whoever has written them."""

from __future__ import annotations

from pathlib import Path

from node.checkpoint import global_model
from node.checkpoint.global_model import find_whole, read_together
from node.checkpoint.layout import round_folder
from node.core.model.init import initial_parameters
from protocol.run_files.resolve import resolve

SPEC = resolve("nano", overrides={"swarm.stages": 3, "model.layers": 3})


def write(root: Path, round_number: int, *stages: int) -> Path:
    folder = root / "checkpoint" / round_folder(round_number)
    found = {stage: initial_parameters(SPEC, stage) for stage in stages}
    global_model.write(folder, SPEC, round_number, found)
    return folder


def test_members_of_a_swarm_have_a_whole_model_together(tmp_path: Path) -> None:
    assert find_whole(tmp_path, -1) is None
    one, two = tmp_path / "nodes" / "one", tmp_path / "nodes" / "two"
    parts = write(one, 2, 0, 1), write(two, 2, 1, 2)
    write(one, 4, 0, 1)
    assert find_whole(tmp_path, -1) == find_whole(tmp_path, 1) == (2, parts)
    assert find_whole(tmp_path, 2) is None
    assert find_whole(one, -1) is None
    found = read_together(parts)
    assert sorted(found.stages) == [0, 1, 2]
    assert found.round_number == 2
    whole = write(tmp_path / "nodes" / "full", 4, 0, 1, 2)
    assert find_whole(tmp_path, 2) == (4, (tmp_path / "nodes/full/checkpoint/round-000004",))
    assert find_whole(whole.parent.parent, 2) == find_whole(whole.parent, 2) == find_whole(whole, 2)


def test_a_damaged_or_vanished_checkpoint_is_passed_over(tmp_path: Path) -> None:
    good, bad = write(tmp_path, 2, 0, 1, 2), write(tmp_path, 3, 0, 1, 2)
    (bad / "manifest.json").write_text("{}")
    assert find_whole(tmp_path, -1) == (2, (good,))
    (good / "spec.json").unlink()
    assert find_whole(tmp_path, -1) is None
