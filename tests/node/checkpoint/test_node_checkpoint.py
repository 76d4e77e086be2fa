"""What a node keeps on disk to go on from: the newest that holds, however the others were damaged."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from node.checkpoint import global_model, node_checkpoint, private_state
from node.checkpoint.files import write_tensors
from node.core.model.init import initial_parameters
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import CHUNK_BYTES, digest_of, header_of
from protocol.math.outer_step import anchor_digest
from protocol.types import StageRange
from tests.support import commands
from tests.support.checkpoints import (
    HOSTED,
    SPEC,
    anchors_of,
    assert_holds,
    assert_same,
    embedding_of,
    files_of,
    private_of,
    write_checkpoint,
)


def test_what_was_written_is_restored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 10)


def test_there_is_nothing_to_restore_where_nothing_was_written(tmp_path: Path) -> None:
    assert node_checkpoint.newest(tmp_path / "nowhere", SPEC, HOSTED) is None


def test_the_one_before_is_kept_and_older_ones_are_removed(tmp_path: Path) -> None:
    for round_number in (9, 10, 20, 100):
        write_checkpoint(tmp_path, round_number)
    (tmp_path / "round-000001").mkdir()  # not ours
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-000001",
        "round-000020",
        "round-000100",
    ]


def test_a_checkpoint_of_another_run_or_of_other_stages_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, 10)
    other = SPEC.model_copy(update={"seed": 1})
    assert node_checkpoint.newest(tmp_path, other, HOSTED) is None
    assert node_checkpoint.newest(tmp_path, SPEC, StageRange(0, 1)) is None
    assert "another run" in caplog.text


def test_anchors_that_are_kept_for_rollbacks_are_not_called_corrupt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for round_number in (16, 20, 24, 28):
        write_checkpoint(tmp_path, round_number)
    assert not (tmp_path / "round-000020" / "private").exists()
    found = node_checkpoint.newest(tmp_path, SPEC, StageRange(0, 2))  # after a move, each has some of them
    assert found is not None
    assert (found.round_number, found.private is not None) == (28, True)
    for newer in ("round-000024", "round-000028"):
        shutil.rmtree(tmp_path / newer)
    assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 20, private=False)
    assert caplog.text == ""


def test_who_was_moved_finds_what_it_has_of_its_new_stages(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
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
    assert_same(dict(found.embedding), {"emb": first[0]["emb"]})


def test_a_checkpoint_with_all_stages_comes_before_a_newer_one_with_some(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    some = {2: anchors_of(20)[2]}
    node_checkpoint.write(tmp_path / "round-000020", SPEC, 20, some, embedding_of(20), {})
    assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 10)


def test_a_follower_misses_the_embedding_where_there_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "round-000010"
    node_checkpoint.write(folder, SPEC, 10, anchors_of(10), None, private_of(10))
    found = node_checkpoint.newest(tmp_path, SPEC, HOSTED)
    assert found is not None
    assert found.embedding is None


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    write_checkpoint(root, 10)
    write_checkpoint(root, 20)
    return root


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
    path = data.draw(st.sampled_from(files_of(newest)))
    content = path.read_bytes()
    damage = DAMAGE[data.draw(st.sampled_from(sorted(DAMAGE)))]
    changed = damage(content, data.draw(st.integers(0, len(content) * 8 - 1)))
    try:
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        found = node_checkpoint.newest(pristine, SPEC, HOSTED)
        if path.parent.name == "private":
            assert_holds(found, 20, private=False)
        else:
            assert_holds(found, 10)
    finally:
        path.write_bytes(content)


def test_what_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, 10)
    damaged = write_checkpoint(tmp_path, 20) / "stage-01.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 10)
    assert str(damaged) in caplog.text


def test_private_state_of_another_round_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    older, newer = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    shutil.rmtree(newer / "private")
    shutil.copytree(older / "private", newer / "private")
    assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 20, private=False)


def test_others_read_and_assemble_it_without_what_is_private(tmp_path: Path) -> None:
    part = write_checkpoint(tmp_path / "node", 10)
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
    folder = write_checkpoint(tmp_path, 10)
    manifest = global_model.MANIFEST_FILE.read(folder / "manifest.json")
    assert manifest.embedding is not None
    parts = {1: (anchors_of(10)[1], manifest.stages[1]), 2: (anchors_of(10)[2], manifest.stages[2])}
    for parameters, entry in (*parts.values(), (embedding_of(10), manifest.embedding)):
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
    assert_same(load_file(tmp_path / "ours.safetensors"), tensors)
    content = (tmp_path / "ours.safetensors").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_failure_between_the_files_leaves_nothing_and_the_next_write_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 10)

    def fail(partial: Path, *_: object) -> None:
        assert (partial / "stage-01.safetensors").exists()
        raise HetnodeError(ErrorCode.WORKER_DIED, "as planned", "")

    with monkeypatch.context() as patched:
        patched.setattr(private_state, "write", fail)
        with pytest.raises(HetnodeError, match="as planned"):
            write_checkpoint(tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["round-000010"]
    write_checkpoint(tmp_path, 20)
    assert_holds(node_checkpoint.newest(tmp_path, SPEC, HOSTED), 20)


@pytest.mark.parametrize("means", ["tmpfs", "limit"])
def test_a_full_disk_is_reported_and_leaves_what_was_there(tmp_path: Path, means: str) -> None:
    if means == "tmpfs" and subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("may not mount a file system here")
    done = commands.run("tests.support.full_disk", means, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["disk-full"] * 5
