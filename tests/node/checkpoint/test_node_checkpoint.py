"""What a node keeps on disk to go on from: the newest that holds, however the others were damaged."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from node.checkpoint import global_model, node_checkpoint, private_state
from node.checkpoint.files import write_tensors
from node.checkpoint.node_checkpoint import Restored
from node.checkpoint.private_state import StageState
from node.model.init import initial_parameters
from node.optimizer.inner import AdamWState
from protocol.algorithm.digest import CHUNK_BYTES, digest_of, header_of
from protocol.algorithm.outer_step import anchor_digest
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.types import StageRange
from tests.support.paths import ROOT

SPEC = resolve("nano", overrides={"model.layers": 3, "swarm.stages": 3, "model.vocabulary": 16})
HOSTED = StageRange(1, 3)


def _anchors(round_number: int) -> dict[int, dict[str, Tensor]]:
    return {
        stage: {name: tensor + round_number for name, tensor in initial_parameters(SPEC, stage).items()}
        for stage in HOSTED
    }


def _embedding(round_number: int) -> dict[str, Tensor]:
    return {"emb": initial_parameters(SPEC, 0)["emb"] + round_number}


def _private(round_number: int) -> dict[int, StageState]:
    """Stage 1 has learned something and has moments, stage 2 has neither."""
    anchors = _anchors(round_number)
    error = {stage: {name: tensor * 0.5 for name, tensor in anchors[stage].items()} for stage in HOSTED}
    first = {name: tensor * 2 for name, tensor in anchors[1].items()}
    second = {name: tensor * tensor for name, tensor in anchors[1].items()}
    local = {"1.wq": anchors[1]["1.wq"] - 3}
    return {
        1: StageState(error[1], local, AdamWState(steps=7, cold_steps=2, exp_avg=first, exp_avg_sq=second)),
        2: StageState(error[2], {}, None),
    }


def _write(root: Path, round_number: int) -> Path:
    folder = root / f"round-{round_number:06d}"
    node_checkpoint.write(
        folder, SPEC, round_number, _anchors(round_number), _embedding(round_number), _private(round_number)
    )
    return folder


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _assert_holds(found: Restored | None, round_number: int, private: bool = True) -> None:
    assert found is not None
    assert found.round_number == round_number
    for stage, parameters in _anchors(round_number).items():
        _assert_same(dict(found.stages[stage]), parameters)
    assert found.embedding is not None
    _assert_same(dict(found.embedding), _embedding(round_number))
    assert (found.private is not None) == private
    for stage, state in (found.private or {}).items():
        expected = _private(round_number)[stage]
        _assert_same(dict(state.error), dict(expected.error))
        _assert_same(dict(state.local), dict(expected.local))
        assert (state.moments is None) == (expected.moments is None)
        if state.moments is not None and expected.moments is not None:
            assert (state.moments["steps"], state.moments["cold_steps"]) == (7, 2)
            _assert_same(state.moments["exp_avg"], expected.moments["exp_avg"])
            _assert_same(state.moments["exp_avg_sq"], expected.moments["exp_avg_sq"])


def test_what_was_written_is_restored(tmp_path: Path) -> None:
    _write(tmp_path, 10)
    _assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 10)


def test_there_is_nothing_to_restore_where_nothing_was_written(tmp_path: Path) -> None:
    assert node_checkpoint.newest(tmp_path / "nowhere", SPEC, HOSTED) is None


def test_the_one_before_is_kept_and_older_ones_are_removed(tmp_path: Path) -> None:
    for round_number in (9, 10, 20, 100):
        _write(tmp_path, round_number)
    (tmp_path / "round-000001").mkdir()  # not ours
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-000001",
        "round-000020",
        "round-000100",
    ]


def test_a_checkpoint_of_another_run_or_of_other_stages_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, 10)
    other = SPEC.model_copy(update={"seed": 1})
    assert node_checkpoint.newest(tmp_path, other, HOSTED) is None
    assert node_checkpoint.newest(tmp_path, SPEC, StageRange(0, 1)) is None
    assert "another run" in caplog.text


def test_who_was_moved_finds_what_it_has_of_its_new_stages(tmp_path: Path) -> None:
    _write(tmp_path, 10)
    found = node_checkpoint.newest(tmp_path, SPEC, StageRange(0, 2))
    assert found is not None
    assert (found.round_number, found.stages.keys(), found.embedding) == (10, {1}, None)
    assert found.private is not None
    assert found.private.keys() == {1}
    alone = node_checkpoint.newest(tmp_path, SPEC, StageRange(2, 3))
    assert alone is not None
    assert alone.stages.keys() == {2}
    assert alone.embedding is not None


def test_the_host_of_the_first_stage_has_the_embedding_of_those_that_follow(tmp_path: Path) -> None:
    first = {stage: initial_parameters(SPEC, stage) for stage in (0, 1)}
    node_checkpoint.write(tmp_path / "round-000010", SPEC, 10, first, None, {})
    found = node_checkpoint.newest(tmp_path, SPEC, StageRange(1, 2))
    assert found is not None
    assert found.embedding is not None
    _assert_same(dict(found.embedding), {"emb": first[0]["emb"]})


def test_a_checkpoint_with_all_stages_comes_before_a_newer_one_with_some(tmp_path: Path) -> None:
    _write(tmp_path, 10)
    some = {2: _anchors(20)[2]}
    node_checkpoint.write(tmp_path / "round-000020", SPEC, 20, some, _embedding(20), {})
    _assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 10)


def test_a_follower_misses_the_embedding_where_there_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "round-000010"
    node_checkpoint.write(folder, SPEC, 10, _anchors(10), None, _private(10))
    found = node_checkpoint.newest(tmp_path, SPEC, HOSTED)
    assert found is not None
    assert found.embedding is None


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    _write(root, 10)
    _write(root, 20)
    return root


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


DAMAGE: dict[str, Callable[[bytes, int], bytes | None]] = {
    "a flipped bit": lambda content, at: (
        content[: at // 8] + bytes([content[at // 8] ^ 1 << at % 8]) + content[at // 8 + 1 :]
    ),
    "truncated": lambda content, at: content[: at // 8],
    "gone": lambda content, at: None,
}


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_damaged_in_the_newest_nothing_wrong_is_ever_restored(
    pristine: Path, data: st.DataObject
) -> None:
    newest = pristine / "round-000020"
    path = data.draw(st.sampled_from(_files(newest)))
    content = path.read_bytes()
    damage = DAMAGE[data.draw(st.sampled_from(sorted(DAMAGE)))]
    changed = damage(content, data.draw(st.integers(0, len(content) * 8 - 1)))
    try:
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        found = node_checkpoint.newest(pristine, SPEC, HOSTED)
        if path.parent.name == "private":
            _assert_holds(found, 20, private=False)
        else:
            _assert_holds(found, 10)
    finally:
        path.write_bytes(content)


def test_what_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path, 10)
    damaged = _write(tmp_path, 20) / "stage-01.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    _assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 10)
    assert str(damaged) in caplog.text


def test_private_state_of_another_round_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    older, newer = _write(tmp_path, 10), _write(tmp_path, 20)
    shutil.rmtree(newer / "private")
    shutil.copytree(older / "private", newer / "private")
    _assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 20, private=False)


def test_others_read_and_assemble_it_without_what_is_private(tmp_path: Path) -> None:
    part = _write(tmp_path / "node", 10)
    first = tmp_path / "other"
    global_model.write(first, SPEC, 10, {0: initial_parameters(SPEC, 0)})
    global_model.assemble([part, first], tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == [
        "manifest.json",
        "spec.json",
        *(f"stage-{stage:02d}.safetensors" for stage in range(3)),
    ]
    assert set(global_model.read(tmp_path / "whole").stages) == {0, 1, 2}
    assert global_model.find(tmp_path / "node") == part


def _data_section(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_the_data_of_a_file_is_the_byte_stream_that_its_anchor_digest_covers(tmp_path: Path) -> None:
    folder = _write(tmp_path, 10)
    manifest = global_model.Manifest.model_validate_json((folder / "manifest.json").read_text())
    assert manifest.embedding is not None
    parts = {1: (_anchors(10)[1], manifest.stages[1]), 2: (_anchors(10)[2], manifest.stages[2])}
    for parameters, entry in (*parts.values(), (_embedding(10), manifest.embedding)):
        stream = _data_section(folder / entry.file)
        header = header_of({name: tuple(tensor.shape) for name, tensor in parameters.items()})
        starts = range(0, len(stream), CHUNK_BYTES)
        hashes = [hashlib.sha256(stream[start : start + CHUNK_BYTES]).digest() for start in starts]
        assert digest_of(header, hashes) == entry.anchor_digest == anchor_digest(parameters)


def test_the_files_are_those_that_the_library_of_the_format_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a.x": torch.randn(7), "ä": torch.randn(1, 1).T, "A": torch.ones(2)}
    entry = write_tensors(tmp_path / "ours.safetensors", tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "library")
    assert _data_section(tmp_path / "ours.safetensors") == _data_section(tmp_path / "library")
    _assert_same(load_file(tmp_path / "ours.safetensors"), tensors)
    content = (tmp_path / "ours.safetensors").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_failure_between_the_files_leaves_nothing_and_the_next_write_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 10)

    def fail(partial: Path, *_: object) -> None:
        assert (partial / "stage-01.safetensors").exists()
        raise HetnodeError(ErrorCode.WORKER_DIED, "as planned", "")

    with monkeypatch.context() as patched:
        patched.setattr(private_state, "write", fail)
        with pytest.raises(HetnodeError, match="as planned"):
            _write(tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["round-000010"]
    _write(tmp_path, 20)
    _assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 20)


def sizes_to_try(root: Path) -> Iterator[int]:
    """Disk space in bytes that ends at different places of a checkpoint like the one below `root`."""
    total = sum(path.stat().st_size for path in _files(root))
    yield from (total * percent // 100 for percent in (3, 20, 45, 70, 90))


MEANS = {
    "full file system": ["unshare", "--mount", sys.executable, "-m", "tests.support.full_disk", "tmpfs"],
    "limited file size": [sys.executable, "-m", "tests.support.full_disk", "limit"],
}


@pytest.mark.parametrize("means", MEANS)
def test_a_full_disk_is_reported_and_leaves_what_was_there(tmp_path: Path, means: str) -> None:
    command = MEANS[means]
    if means == "full file system" and subprocess.run([*command[:2], "true"], check=False).returncode:
        pytest.skip("may not mount a file system here")
    root = ROOT
    done = subprocess.run(
        [*command, str(tmp_path)], check=False, capture_output=True, text=True, timeout=120, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["disk-full"] * 5
