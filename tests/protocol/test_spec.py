"""Specs: presets, files and overrides in order, hashes, and messages for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.link_text import dtype_text
from protocol.run_files.presets import PRESETS
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.fixed import PLAIN_CLIP
from protocol.spec.run import RunSpec
from tests.builders import spec_of

PLAIN = {"outer.clip": PLAIN_CLIP}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_and_survives_json_and_toml(preset: str, tmp_path: Path) -> None:
    spec = resolve(preset)
    assert RunSpec.from_json(spec.canonical_json) == spec
    file = tmp_path / "run.toml"
    file.write_text(to_toml(spec))
    assert resolve(file=file) == spec
    assert resolve(file=file).hash == spec.hash


def test_a_run_file_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(resolve("nano")), encoding="utf-8-sig")
    assert resolve(file=file) == resolve("nano")


@pytest.mark.parametrize("source", ["text:dir/\U0001f600é", 'text:a"b\\c\x7f\t'])
def test_a_path_of_any_letters_survives_a_run_file(source: str, tmp_path: Path) -> None:
    for data in (source, [{"name": "web", "source": source}]):
        spec = resolve("nano", overrides={"data.source": data})
        (tmp_path / "run.toml").write_text(to_toml(spec), encoding="ascii")
        assert resolve(file=tmp_path / "run.toml") == spec


@pytest.mark.parametrize("section", ["data", "inner"])
def test_a_section_that_is_none_is_refused(section: str) -> None:
    with pytest.raises(HetnodeError, match=f"{section}: Input should be a valid dictionary") as caught:
        resolve("nano", overrides={section: 5})
    assert caught.value.code is ErrorCode.BAD_SPEC


@pytest.mark.parametrize("field", ["inner.steps", "inner.learning_rate", "data.source"])
def test_true_is_no_number(field: str, tmp_path: Path) -> None:
    section, name = field.split(".")
    (tmp_path / "run.toml").write_text(f"[{section}]\n{name} = true\n")
    with pytest.raises(HetnodeError, match="true is neither a number nor a text"):
        resolve(file=tmp_path / "run.toml")
    assert resolve("nano", overrides={"model.tied_head": False}) == resolve("nano")


@pytest.mark.parametrize(
    ("preset", "start"),
    [
        ("tiny", "368dd9d983e7"),
        ("nano", "d2a9dc5ffe74"),
        ("178m", "7ef7f8e9d099"),
        ("512m", "3fde17ef325d"),
        ("1b", "8e051855ffa1"),
        ("8b", "75d2401cd5ab"),
        ("70b", "5f916f736ce9"),
    ],
)
def test_the_hashes_of_the_presets_are_these(preset: str, start: str) -> None:
    """Peers agree on a run by its hash: another hash is another run.

    JSON without `outer.clip` is that of a plain mean, so it keeps its hash, and its runs their results.
    """
    plain = resolve(preset, overrides=PLAIN)
    assert plain.hash.startswith(start)
    assert "clip" not in plain.tree["outer"]
    assert RunSpec.from_json(plain.canonical_json).outer.clip == PLAIN_CLIP
    assert resolve(preset).tree["outer"]["clip"] == 1.0
    assert resolve(preset).hash != plain.hash


@pytest.mark.parametrize(
    ("preset", "replicas", "step", "budget"),
    [
        ("178m", 8, 524_288, 3_040_870_400),
        ("512m", 8, 524_288, 10_249_830_400),
        ("1b", 2, 65_536, 10_253_107_200),
    ],
)
def test_the_papers_presets_have_its_replicas_batch_and_tokens(
    preset: str, replicas: int, step: int, budget: int
) -> None:
    spec = resolve(preset)
    assert spec.swarm.replicas + spec.swarm.pipelines == replicas
    samples = replicas * spec.inner.microbatches * spec.inner.microbatch_size
    assert samples * spec.model.context == step
    assert spec.rounds * spec.inner.steps * step == spec.total_steps * step == budget
    assert (spec.inner.steps, spec.swarm.stages, spec.link.k * 8) == (50, 4, spec.model.width)


def test_nine_layers_in_four_stages_leave_the_most_to_the_first() -> None:
    spec = resolve("178m")
    assert [list(spec.layers_of(stage)) for stage in range(4)] == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize(
    "model",
    [
        {"key_value_heads": 1},
        {"head_width": 24},
        {"width": 30, "heads": 4, "head_width": 8},
        {"qkv_bias": True},
        {"qk_norm": True, "rope_scaling": "linear", "rope_factor": 2.0},
        {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_context": 64},
        {"rope_scaling": "smollm3"},
        {"norms": "outputs", "key_value_heads": 1},
    ],
)
def test_an_architecture_is_part_of_the_specification(model: dict[str, Any], tmp_path: Path) -> None:
    spec = resolve("nano", overrides={f"model.{name}": value for name, value in model.items()})
    assert spec.hash != resolve("nano").hash
    assert RunSpec.from_json(spec.canonical_json) == spec
    file = tmp_path / "run.toml"
    file.write_text(to_toml(spec))
    assert resolve(file=file) == spec
    assert {name: getattr(spec.model, name) for name in model} == model


def test_optional_fields_at_their_default_keep_the_hash() -> None:
    given = {"key_value_heads": 2, "head_width": 16, "qk_norm": False, "rope_factor": 1.0} | {
        "norms": "inputs"
    }
    spec = resolve("nano", overrides={f"model.{name}": value for name, value in given.items()})
    assert spec.hash == resolve("nano").hash
    assert resolve("tiny", overrides={"model.heads": 8}).model.key_value_heads == 8


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ({"heads": 3}, "does not split into 3 heads of even width"),
        ({"head_width": 7}, "even"),
        ({"heads": 4, "key_value_heads": 3}, "cannot share"),
        ({"key_value_heads": 4}, "cannot share"),
        ({"qk_norm": True, "qkv_bias": True}, "exclude each other"),
        ({"rope_factor": 2.0}, "rope_scaling"),
        ({"rope_scaling": "yarn"}, "llama3"),
        ({"rope_scaling": "smollm3", "rope_factor": 2.0}, "rope_factor"),
        ({"rope_scaling": "smollm3", "qk_norm": True}, "no published architecture"),
        ({"norms": "outputs", "qkv_bias": True}, "no published architecture"),
        ({"norms": "outputs", "qk_norm": True}, "no published architecture"),
        ({"norms": "outputs", "rope_scaling": "smollm3"}, "no published architecture"),
        ({"norms": "both"}, "outputs"),
        ({"width": "wide"}, "width"),
    ],
)
def test_an_impossible_architecture_is_refused(model: dict[str, Any], word: str) -> None:
    with pytest.raises(HetnodeError, match=word) as caught:
        resolve("nano", overrides={f"model.{name}": value for name, value in model.items()})
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_whether_links_may_be_uncompressed_is_part_of_the_specification(tmp_path: Path) -> None:
    ladder = {"link.least_k": 4, "link.most_k": 24, "link.k": 0, "link.uncompressed": True}
    spec = resolve("nano", overrides=ladder)
    assert spec.link.possible_ks == (4, 8, 16, 24, 0)
    assert RunSpec.from_json(spec.canonical_json) == spec
    file = tmp_path / "run.toml"
    file.write_text(to_toml(spec))
    assert resolve(file=file) == spec
    fixed = resolve("nano", overrides={"link.uncompressed": False})
    assert fixed.hash == resolve("nano").hash
    assert "uncompressed" not in fixed.canonical_json
    assert fixed.link.possible_ks == (8,)
    assert resolve("nano", overrides={"link.k": 0}).link.possible_ks == (0,)


def test_how_often_links_get_the_embedding_is_part_of_the_specification(tmp_path: Path) -> None:
    spec = resolve("nano", overrides={"link.embedding_every": 5})
    assert RunSpec.from_json(spec.canonical_json) == spec
    file = tmp_path / "run.toml"
    file.write_text(to_toml(spec))
    assert resolve(file=file) == spec
    usual = resolve("nano", overrides={"link.embedding_every": 0})
    assert usual.hash == resolve("nano").hash != spec.hash
    assert "embedding_every" not in usual.canonical_json


def test_the_number_format_of_gradients_is_part_of_the_specification() -> None:
    spec = resolve("nano", overrides={"link.dtype": "dither5", "link.gradient_dtype": "dither3"})
    assert RunSpec.from_json(spec.canonical_json) == spec
    assert (spec.link.dtype_of_gradients, dtype_text(spec.link)) == ("dither3", "dither5, gradients dither3")
    assert spec.link.token_bytes(16) == (11, 7)
    usual = resolve("nano", overrides={"link.gradient_dtype": ""})
    assert usual.hash == resolve("nano").hash != spec.hash
    assert "gradient_dtype" not in usual.canonical_json
    assert (usual.link.dtype_of_gradients, dtype_text(usual.link)) == ("bf16", "bf16")
    assert usual.link.token_bytes(16) == (32, 32)


def test_whether_links_have_tables_is_part_of_the_specification() -> None:
    spec = resolve("nano", overrides={"link.table": True, "link.table_rows": 4})
    assert RunSpec.from_json(spec.canonical_json) == spec
    usual = resolve("nano", overrides={"link.table": False})
    assert usual.hash == resolve("nano").hash != spec.hash
    assert "table" not in usual.canonical_json


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"link.table_rows": 4}, "is for link.table"),
        ({"link.table": True, "link.k": 0}, "they lose nothing"),
        ({"link.table": True, "link.table_rows": 1000}, "exceeds model.vocabulary"),
        ({"link.table": True, "swarm.replicas": 0}, "needs a full replica"),
    ],
)
def test_tables_that_are_of_no_use_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(HetnodeError, match=message) as caught:
        resolve("nano", overrides=overrides)
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_steps_that_overlap_are_eager_in_the_json_of_every_run_that_has_them() -> None:
    spec = resolve("nano", overrides={"outer.overlap": 1} | PLAIN)
    assert spec.tree["outer"]["eager"] is True
    assert "eager" not in resolve("nano").tree["outer"]
    assert RunSpec.from_json(spec.canonical_json) == spec
    assert spec.hash.startswith("1c5120c9d726")


def test_the_hash_of_a_run_whose_k_adapts_is_this() -> None:
    ladder = {"link.least_k": 4, "link.most_k": 24} | PLAIN
    assert resolve("nano", overrides=ladder).hash.startswith("9cf4e6be")
    assert resolve("nano", overrides={**ladder, "link.uncompressed": True}).hash[:8] != "9cf4e6be"


@pytest.mark.parametrize(
    ("ks", "least", "most", "words"),
    [
        (-1, 0, 0, ["link.k", "-1"]),
        (8, -2, 16, ["link.least_k", "-2"]),
        (8, 4, 0, ["link.least_k and link.most_k, or neither"]),
        (8, 0, 16, ["link.least_k and link.most_k, or neither"]),
        (8, 16, 4, ["link.least_k 16 exceeds link.most_k 4"]),
        (33, 0, 0, ["link.k 33", "32"]),
        (8, 4, 33, ["link.most_k 33", "32"]),
        (0, 4, 16, ["link.k 0", "link.uncompressed"]),
    ],
)
def test_an_impossible_choice_of_k_is_one_problem(ks: int, least: int, most: int, words: list[str]) -> None:
    with pytest.raises(HetnodeError) as refused:
        resolve("nano", overrides={"link.k": ks, "link.least_k": least, "link.most_k": most})
    assert refused.value.code is ErrorCode.BAD_SPEC
    assert ";" not in refused.value.cause
    assert all(word in refused.value.cause for word in words)


def test_links_may_become_uncompressed_only_where_k_adapts() -> None:
    with pytest.raises(HetnodeError, match=r"needs link\.least_k and link\.most_k") as refused:
        resolve("nano", overrides={"link.uncompressed": True})
    assert refused.value.code is ErrorCode.BAD_SPEC


def test_overrides_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "nano"\nrounds = 7\n[link]\nk = 4\n')
    spec = resolve(file=file, overrides={"link.k": 2, "seed": None})
    assert (spec.preset, spec.rounds, spec.link.k, spec.model.width) == ("nano", 7, 2, 32)
    assert resolve("tiny", file).model.width == 128


def test_equal_specs_have_equal_hashes_and_every_field_counts() -> None:
    assert resolve("tiny").hash == resolve("tiny").hash
    assert resolve("tiny").hash != resolve("tiny", overrides={"timing.fetch": 21.0}).hash


@given(st.integers(1, 64), st.integers(1, 64))
def test_stages_cut_the_layers_into_contiguous_nonempty_parts(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(HetnodeError):
            resolve(overrides={"model.layers": layers, "swarm.stages": stages})
        return
    spec = resolve(overrides={"model.layers": layers, "swarm.stages": stages, "swarm.pipelines": 0})
    cut = [spec.layers_of(stage) for stage in range(stages)]
    assert [layer for part in cut for layer in part] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"link.k": 129}, ["link.k", "129", "128"]),
        ({"swarm.stages": 5}, ["swarm.stages", "5", "4"]),
        ({"model.heads": 3}, ["128", "3"]),
        ({"data.source": "ftp:x"}, ["ftp:x", "jsonl:PATH"]),
        ({"rounds": 0}, ["rounds", "0"]),
        ({"outer.top_k": 5000}, ["top_k", "5000", "4096"]),
        ({"swarm.replicas": 0, "swarm.pipelines": 0}, ["swarm", "at least one"]),
        ({"inner.learning_rate": float("nan")}, ["inner.learning_rate"]),
        ({"no.such": 1}, ["no"]),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(HetnodeError) as refused:
        resolve("tiny", overrides=overrides)
    assert refused.value.code is ErrorCode.BAD_SPEC
    for word in words:
        assert word in str(refused.value)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(HetnodeError) as refused:
        resolve("huge")
    assert refused.value.code is ErrorCode.UNKNOWN_PRESET
    assert all(preset in refused.value.remedy for preset in PRESETS)


@pytest.mark.parametrize("content", [b"rounds = ", b"\xff\xfe", b"link = 3\n", b'preset = ["nano"]\n', None])
def test_a_run_file_that_is_none_is_one_message(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(HetnodeError) as refused:
        resolve(file=file, overrides={"link.k": 3})
    assert refused.value.code in (ErrorCode.BAD_SPEC, ErrorCode.UNKNOWN_PRESET)


def test_heartbeats_become_rarer_in_a_large_swarm_but_three_fit_into_the_silence_of_a_lost_peer() -> None:
    timing = spec_of(timing__heartbeat=2.0, timing__lost_after=30.0).timing
    assert [timing.heartbeat_of(peers) for peers in (0, 200, 300, 1000, 5000)] == [2.0, 2.0, 3.0, 10.0, 10.0]
    assert spec_of(timing__heartbeat=5.0, timing__lost_after=15.0).timing.heartbeat_of(5000) == 5.0


@pytest.mark.parametrize("name", ["data.source", "data.tokenizer"])
def test_a_name_that_no_file_of_settings_can_hold_is_refused(name: str) -> None:
    """What a file system gives for bytes that are no UTF-8."""
    with pytest.raises(HetnodeError, match="is not UTF-8: rename that file") as caught:
        resolve("nano", overrides={name: "text:n\udcff.txt"})
    assert caught.value.code is ErrorCode.BAD_SPEC
    str(caught.value).encode()


def test_a_copy_with_other_settings_has_its_own_hash() -> None:
    spec = resolve("nano")
    before = spec.hash
    copied = spec.model_copy(update={"rounds": spec.rounds + 1})
    assert copied.hash == resolve("nano", overrides={"rounds": spec.rounds + 1}).hash != before
    assert spec.hash == before
    assert spec == resolve("nano"), "a hash that is known makes no difference"
