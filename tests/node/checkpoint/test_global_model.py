"""A checkpoint is read whole and unchanged, or refused with the reason; a crash never leaves half of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from node.checkpoint import global_model
from node.checkpoint.files import publish
from node.checkpoint.global_model import MANIFEST_FILE, Manifest
from node.core.model.init import initial_parameters
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

SPEC = resolve("nano", overrides={"model.layers": 3, "swarm.stages": 3, "model.vocabulary": 16})
ROUND = 12


def _stages(*numbers: int, spec: RunSpec = SPEC) -> dict[int, dict[str, Tensor]]:
    return {number: initial_parameters(spec, number) for number in numbers}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "round-000012"
    global_model.write(folder, SPEC, ROUND, _stages(0, 1, 2))
    return folder


def _refusal(folder: Path) -> HetnodeError:
    with pytest.raises(HetnodeError) as caught:
        global_model.read(folder)
    assert caught.value.remedy
    with pytest.raises(HetnodeError):
        global_model.verify(folder)
    return caught.value


def _assert_holds(folder: Path, stages: dict[int, dict[str, Tensor]], round_number: int = ROUND) -> None:
    found = global_model.read(folder)
    assert (found.spec, found.round_number) == (SPEC, round_number)
    assert found.stages.keys() == stages.keys()
    for number, parameters in stages.items():
        assert list(found.stages[number]) == list(parameters)
        for name, tensor in parameters.items():
            assert torch.equal(found.stages[number][name], tensor)


def _reseal(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Rewrite the manifest with a valid checksum, as an attacker can."""
    path = folder / "manifest.json"
    MANIFEST_FILE.write(path, change(MANIFEST_FILE.read(path)))


def _replace_stage(folder: Path, stage: int, tensors: dict[str, Tensor]) -> None:
    """Put another stage file in place, with a manifest that vouches for its bytes."""
    path = folder / f"stage-{stage:02d}.safetensors"
    save_file(tensors, path)
    content = path.read_bytes()

    def vouch(manifest: Manifest) -> Manifest:
        sha256 = hashlib.sha256(content).hexdigest()
        entry = replace(manifest.stages[stage], bytes=len(content), sha256=sha256)
        return replace(manifest, stages={**manifest.stages, stage: entry})

    _reseal(folder, vouch)


def test_what_was_written_is_read(folder: Path) -> None:
    _assert_holds(folder, _stages(0, 1, 2))
    global_model.require_complete(global_model.verify(folder))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_member_may_write_only_its_stages(tmp_path: Path) -> None:
    global_model.write(tmp_path / "part", SPEC, ROUND, _stages(1))
    _assert_holds(tmp_path / "part", _stages(1))
    with pytest.raises(HetnodeError, match="stages 0, 2"):
        global_model.require_complete(global_model.verify(tmp_path / "part"))


def test_equal_parameters_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    reordered = {stage: dict(reversed(p.items())) for stage, p in _stages(0, 1, 2).items()}
    global_model.write(tmp_path / "again", SPEC, ROUND, reordered)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_what_was_read_no_longer_depends_on_the_file(folder: Path) -> None:
    found = global_model.read(folder)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(found.stages[0]["emb"], _stages(0)[0]["emb"])
    found.stages[0]["emb"].add_(1)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_in_any_file_is_noticed(folder: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) * 8 - 1))
    flipped = bytearray(content)
    flipped[position // 8] ^= 1 << position % 8
    path.write_bytes(flipped)
    try:
        assert _refusal(folder).code is ErrorCode.CHECKPOINT_CORRUPT
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["stage-01.safetensors", "spec.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "longer"])
def test_a_file_of_another_length_is_corrupt(folder: Path, name: str, damage: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(
        {"truncated": content[:-1], "emptied": b"", "longer": content + b" "}[damage],
    )
    error = _refusal(folder)
    assert error.code is ErrorCode.CHECKPOINT_CORRUPT
    assert name in error.cause


@pytest.mark.parametrize("name", ["stage-01.safetensors", "spec.json"])
def test_a_file_that_the_manifest_names_must_exist(folder: Path, name: str) -> None:
    (folder / name).unlink()
    error = _refusal(folder)
    assert error.code is ErrorCode.CHECKPOINT_CORRUPT
    assert name in error.cause


def test_without_a_manifest_there_is_no_checkpoint(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    assert _refusal(folder).code is ErrorCode.CHECKPOINT_MISSING
    assert _refusal(folder.parent / "elsewhere").code is ErrorCode.CHECKPOINT_MISSING


def test_a_manifest_of_any_size_is_not_read_into_memory(folder: Path) -> None:
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(2**30)
    assert "larger than" in _refusal(folder).cause


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 2}', "null", "\x00"])
def test_what_is_no_manifest_is_corrupt(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    assert _refusal(folder).code is ErrorCode.CHECKPOINT_CORRUPT


@pytest.mark.parametrize(
    "change",
    [
        {"head": torch.zeros(3, 3)},
        {"norm_f": torch.ones(32, dtype=torch.float64)},
        {"norm_f": torch.ones(31)},
        {"surplus": torch.ones(1)},
    ],
)
def test_tensors_that_do_not_fit_the_spec_are_refused_though_their_hash_holds(
    folder: Path, change: dict[str, Tensor]
) -> None:
    _replace_stage(folder, 2, {**_stages(2)[2], **change})
    error = _refusal(folder)
    assert error.code is ErrorCode.CHECKPOINT_CORRUPT
    assert "names, dtypes or shapes" in error.cause


def test_other_parameters_than_the_anchor_are_refused_though_their_hash_holds(folder: Path) -> None:
    _replace_stage(folder, 2, {name: tensor + 1 for name, tensor in _stages(2)[2].items()})
    with pytest.raises(HetnodeError, match="anchor digest") as caught:
        global_model.read(folder)
    assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT


def test_a_stage_file_that_is_no_safetensors_is_refused_though_its_hash_holds(folder: Path) -> None:
    content = b"\xff" * 100
    (folder / "stage-02.safetensors").write_bytes(content)
    update = {"bytes": 100, "sha256": hashlib.sha256(content).hexdigest()}
    _reseal(
        folder,
        lambda m: replace(m, stages={2: replace(m.stages[2], **update)}),
    )
    assert _refusal(folder).code is ErrorCode.CHECKPOINT_CORRUPT


def test_a_manifest_cannot_point_outside_its_folder(folder: Path) -> None:
    _reseal(
        folder,
        lambda m: replace(m, stages={0: replace(m.stages[0], file="../round-000012/stage-00.safetensors")}),
    )
    assert "../round-000012" in _refusal(folder).cause


def test_a_stage_that_the_run_does_not_have_is_refused(folder: Path) -> None:
    _reseal(folder, lambda m: replace(m, stages={7: m.stages[0]}))
    assert "stage 7" in _refusal(folder).cause


def test_a_spec_of_another_version_is_refused_with_that_reason(folder: Path) -> None:
    tree = json.loads(SPEC.canonical_json)
    for changed in ({**tree, "unheard_of": 1}, {k: v for k, v in tree.items() if k != "timing"}):
        text = json.dumps(changed)
        (folder / "spec.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        _reseal(folder, lambda m, digest=digest: replace(m, spec_hash=digest))  # type: ignore[misc]
        assert "another version" in _refusal(folder).cause


@pytest.mark.parametrize(
    "wrong", [{"norm_f": torch.ones(31)}, {"norm_f": torch.ones(32).double()}, {"x": torch.ones(1)}]
)
def test_parameters_that_do_not_fit_the_spec_are_never_written(
    folder: Path, wrong: dict[str, Tensor]
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="stage-02"):
        global_model.write(folder, SPEC, ROUND, {**_stages(0, 1), 2: {**_stages(2)[2], **wrong}})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_existing_checkpoint_is_replaced(folder: Path) -> None:
    changed = {s: {name: t * 2 for name, t in p.items()} for s, p in _stages(0, 2).items()}
    global_model.write(folder, SPEC, ROUND + 1, changed)
    _assert_holds(folder, changed, ROUND + 1)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_a_crashed_writer_left_is_no_checkpoint_and_is_removed_by_the_next_write(folder: Path) -> None:
    crashed = folder.with_name(".round-000013.hetnode-partial")
    crashed.mkdir()
    (crashed / "stage-00.safetensors").write_bytes(b"half")
    assert global_model.latest(folder.parent) == folder
    following = folder.with_name("round-000014")
    global_model.write(following, SPEC, 14, _stages(0))
    assert sorted(folder.parent.iterdir()) == [folder, following]


def test_a_crash_in_the_midst_of_replacing_is_undone_by_the_next_write(folder: Path) -> None:
    folder.rename(folder.with_name(".round-000012.hetnode-replaced"))
    global_model.write(folder.with_name("round-000013"), SPEC, 13, _stages(0))
    _assert_holds(folder, _stages(0, 1, 2))


def test_a_crash_after_replacing_leaves_the_new_one(folder: Path) -> None:
    old = folder.with_name(".round-000012.hetnode-replaced")
    old.mkdir()
    (old / "stage-00.safetensors").write_bytes(b"old")
    global_model.write(folder.with_name("round-000013"), SPEC, 13, _stages(0))
    assert not old.exists()
    _assert_holds(folder, _stages(0, 1, 2))


def test_what_others_write_beside_a_folder_is_left_alone(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        (partial / "text").write_text("whole")

    def write_while_another_does(partial: Path) -> None:
        publish(tmp_path / "*", write)
        write(partial)

    (tmp_path / ".*.hetnode-partial").mkdir()
    publish(tmp_path / "one", write_while_another_does)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "*"}
    assert [(tmp_path / name / "text").read_text() for name in ("one", "*")] == ["whole"] * 2


def test_the_latest_checkpoint_is_the_highest_round_that_holds(folder: Path) -> None:
    root = folder.parent
    for round_number in (3, 20, 1_000_000):
        global_model.write(root / f"round-{round_number:06d}", SPEC, round_number, _stages(0))
    (root / "round-000099").mkdir()
    (root / "round-nonsense").mkdir()
    (root / "notes.txt").write_text("kept")
    assert global_model.latest(root) == root / "round-1000000"
    (root / "round-1000000" / "stage-00.safetensors").write_bytes(b"")
    assert global_model.latest(root) == root / "round-000020"


def test_no_checkpoint_is_latest_where_there_is_none(tmp_path: Path) -> None:
    assert global_model.latest(tmp_path) is None
    assert global_model.latest(tmp_path / "nowhere") is None


def _part(folder: Path, *stages: int, round_number: int = ROUND, spec: RunSpec = SPEC) -> Path:
    global_model.write(folder, spec, round_number, _stages(*stages, spec=spec))
    return folder


def _assembly_refusal(parts: list[Path], folder: Path) -> HetnodeError:
    with pytest.raises(HetnodeError) as caught:
        global_model.assemble(parts, folder)
    assert not folder.exists()
    return caught.value


def test_the_parts_of_members_make_one_checkpoint(tmp_path: Path) -> None:
    parts = [_part(tmp_path / "a", 0, 1), _part(tmp_path / "b", 1, 2)]
    global_model.assemble(parts, tmp_path / "whole")
    _assert_holds(tmp_path / "whole", _stages(0, 1, 2))
    global_model.require_complete(global_model.verify(tmp_path / "whole"))


def test_missing_stages_are_named(tmp_path: Path) -> None:
    error = _assembly_refusal([_part(tmp_path / "a", 1)], tmp_path / "whole")
    assert error.code is ErrorCode.CHECKPOINT_MISSING
    assert "stages 0, 2" in error.cause
    assert _assembly_refusal([], tmp_path / "whole").code is ErrorCode.CHECKPOINT_MISSING


def test_parts_of_another_round_or_run_do_not_mix(tmp_path: Path) -> None:
    first = _part(tmp_path / "a", 0, 1)
    other_round = _part(tmp_path / "b", 2, round_number=ROUND + 1)
    other_run = _part(tmp_path / "c", 2, spec=SPEC.model_copy(update={"seed": 1}))
    for other in (other_round, other_run):
        error = _assembly_refusal([first, other], tmp_path / "whole")
        assert error.code is ErrorCode.CHECKPOINT_CORRUPT
        assert str(other) in error.cause


def test_members_that_disagree_on_a_stage_are_both_named(tmp_path: Path) -> None:
    first = _part(tmp_path / "a", 0, 1, 2)
    changed = {1: {name: tensor + 1 for name, tensor in _stages(1)[1].items()}}
    global_model.write(tmp_path / "b", SPEC, ROUND, changed)
    error = _assembly_refusal([first, tmp_path / "b"], tmp_path / "whole")
    assert error.code is ErrorCode.ANCHOR_DIVERGED
    assert str(first) in error.cause
    assert str(tmp_path / "b") in error.cause


def test_a_corrupt_part_spoils_the_assembly(tmp_path: Path) -> None:
    parts = [_part(tmp_path / "a", 0, 1), _part(tmp_path / "b", 2)]
    (parts[1] / "stage-02.safetensors").write_bytes(b"")
    assert _assembly_refusal(parts, tmp_path / "whole").code is ErrorCode.CHECKPOINT_CORRUPT


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    global_model.write(tmp_path / "part", SPEC, 3, _stages(0, 1, 2))
    target = tmp_path / "target"
    precious = target / "thesis.tex" if kind == "folder" else target
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    for attempt in (
        lambda: global_model.write(target, SPEC, 3, _stages(0, 1, 2)),
        lambda: global_model.assemble([tmp_path / "part"], target),
    ):
        with pytest.raises(HetnodeError) as refused:
            attempt()
        assert refused.value.code is ErrorCode.BAD_OPTION
        assert precious.read_text() == "precious"


def test_the_checkpoint_that_a_person_means_is_found_even_when_it_is_corrupt(tmp_path: Path) -> None:
    global_model.write(tmp_path / "run" / "checkpoint", SPEC, 3, _stages(0, 1, 2))
    global_model.write(tmp_path / "node" / "checkpoint" / "round-000003", SPEC, 3, _stages(0, 1, 2))
    assert (
        global_model.find(tmp_path / "run")
        == global_model.find(tmp_path / "run" / "checkpoint")
        == tmp_path / "run" / "checkpoint"
    )
    assert global_model.find(tmp_path / "node") == tmp_path / "node" / "checkpoint" / "round-000003"
    (tmp_path / "run" / "checkpoint" / "stage-00.safetensors").write_bytes(b"x")
    with pytest.raises(HetnodeError) as corrupt:
        global_model.read(global_model.find(tmp_path / "run"))
    assert corrupt.value.code is ErrorCode.CHECKPOINT_CORRUPT


def test_a_run_that_has_not_ended_has_the_checkpoint_of_its_first_node(tmp_path: Path) -> None:
    for name, number in (("00-replica", 3), ("01-stage", 4)):
        kept = tmp_path / "nodes" / name / "checkpoint"
        global_model.write(kept / f"round-{number:06}", SPEC, number, _stages(0, 1, 2))
    assert global_model.find(tmp_path) == tmp_path / "nodes" / "00-replica" / "checkpoint" / "round-000003"
