"""A Hugging Face folder is written whole, read with suspicion, and is the very start of a run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from typer.testing import CliRunner

from node.checkpoint import global_model
from node.checkpoint.initial import initial_from, require_initial
from node.cli.main import app
from node.data.stream import open_stream
from node.data.tokenizer import check_tokenizer
from node.experiment.evaluate import Evaluation, Mode, evaluate
from node.experiment.in_process_replica import LocalReplica, plan_of
from node.hugging_face import importing
from node.hugging_face.export import export, spec_without_folders
from node.hugging_face.importing import import_model, inspect, tokenizer_of
from node.hugging_face.llama import config_of, published_name
from node.hugging_face.weights import DTYPES
from node.worker.compute import Compute
from node.worker.factories import TrainerFactories
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.models import PLAIN, random_model, write_model

GB = 10**9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("run"), PLAIN)


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    export(global_model.verify(run), tmp_path / "hf", DTYPES["fp32"], 100_000)
    return tmp_path / "hf"


def _wanted(folder: Path, **overrides: Any) -> RunSpec:
    model = {f"model.{name}": value for name, value in inspect(folder).model.items()}
    return resolve("nano", overrides={**model, **overrides})


def _import(folder: Path, out: Path, **overrides: Any) -> RunSpec:
    return import_model(inspect(folder), _wanted(folder, **overrides), out)


def _stages(place: Path) -> dict[int, dict[str, Tensor]]:
    return {stage: dict(tensors) for stage, tensors in global_model.read(place).stages.items()}


def _assert_equal(found: dict[int, dict[str, Tensor]], expected: dict[int, dict[str, Tensor]]) -> None:
    flat, wanted = (
        {name: tensor for stage in stages.values() for name, tensor in stage.items()}
        for stages in (found, expected)
    )
    assert flat.keys() == wanted.keys()
    for name, tensor in flat.items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_was_exported_comes_back_bit_for_bit(
    folder: Path, run: Path, tmp_path: Path, stages: int
) -> None:
    spec = _import(folder, tmp_path / "new", **{"swarm.stages": stages, "swarm.pipelines": 0})
    assert spec.model == PLAIN.model
    assert tokenizer_of(inspect(folder)) is None, "the tokenizer of bytes is known by name"
    assert resolve(file=tmp_path / "new" / "run.toml") == spec
    _assert_equal(_stages(tmp_path / "new" / "checkpoint"), _stages(run))


def test_a_replica_starts_where_the_imported_model_stands(folder: Path, tmp_path: Path) -> None:
    spec = _import(folder, tmp_path / "new")
    parts = TrainerFactories(initial=initial_from(tmp_path / "new"))
    model = global_model.read(tmp_path / "new" / "checkpoint")
    stream = open_stream(spec)
    for replica, mode in zip(plan_of(spec).replicas, (Mode.UNCOMPRESSED, Mode.COMPRESSED), strict=True):
        began = LocalReplica(spec, replica, Compute(), stream, parts).validate()
        found = evaluate(model, "builtin", mode=mode, batches=spec.data.validation_batches)
        assert found.loss == pytest.approx(began, rel=1e-5)


def test_a_run_cannot_start_without_the_parameters_that_it_names(folder: Path, tmp_path: Path) -> None:
    spec = _import(folder, tmp_path / "new")
    _import(folder, tmp_path / "other", **{"swarm.stages": 3})
    global_model.write(tmp_path / "foreign", PLAIN, 0, random_model(PLAIN, seed=1))
    require_initial(spec, tmp_path / "new")
    for place in (None, tmp_path / "other", tmp_path / "foreign"):
        for attempt in (lambda: require_initial(spec, place), lambda: initial_from(place)(spec, 1)):  # noqa: B023
            with pytest.raises(HetnodeError) as caught:
                attempt()
            assert caught.value.code is ErrorCode.INITIAL_UNAVAILABLE
    with pytest.raises(HetnodeError) as caught:
        require_initial(spec, tmp_path / "nothing")
    assert caught.value.code is ErrorCode.CHECKPOINT_MISSING


def test_the_same_parameters_are_accepted_whoever_wrote_them(folder: Path, run: Path, tmp_path: Path) -> None:
    spec = _import(folder, tmp_path / "new")
    require_initial(spec, run)


def test_digests_are_part_of_the_specification_and_change_no_other_run(folder: Path, tmp_path: Path) -> None:
    wanted = _wanted(folder)
    spec = _import(folder, tmp_path / "new")
    assert spec.hash != wanted.hash
    assert "initial" not in json.loads(wanted.canonical_json)
    assert RunSpec.from_json(spec.canonical_json) == spec
    with pytest.raises(HetnodeError, match="initial") as caught:
        resolve(file=tmp_path / "new" / "run.toml", overrides={"swarm.stages": 3})
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_the_same_model_can_be_imported_anew_for_a_run_and_no_other(folder: Path, tmp_path: Path) -> None:
    spec = _import(folder, tmp_path / "new")
    assert import_model(inspect(folder), spec, tmp_path / "again") == spec
    export(global_model.verify(write_model(tmp_path, _wanted(folder))), tmp_path / "hf2", DTYPES["bf16"], GB)
    with pytest.raises(HetnodeError) as caught:
        import_model(inspect(tmp_path / "hf2"), spec, tmp_path / "third")
    assert caught.value.code is ErrorCode.INITIAL_UNAVAILABLE
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_weights_are_widened_exactly(run: Path, tmp_path: Path, dtype: str) -> None:
    export(global_model.verify(run), tmp_path / "hf", DTYPES[dtype], GB)
    _import(tmp_path / "hf", tmp_path / "new")
    rounded = {
        stage: {name: tensor.to(DTYPES[dtype].torch).float() for name, tensor in tensors.items()}
        for stage, tensors in _stages(run).items()
    }
    _assert_equal(_stages(tmp_path / "new" / "checkpoint"), rounded)


def test_the_tokenizer_of_the_folder_is_the_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = WordLevel({"[UNK]": 0, "def": 1}, unk_token="[UNK]")
    RawTokenizer(words).save(str(folder / "tokenizer.json"))
    _said("import", "hf", "--out", "new", "--preset", "nano")
    spec = resolve(file=Path("new/run.toml"))
    assert spec.data.tokenizer == "tokenizer.json"
    assert spec.data.tokenizer_sha256 == check_tokenizer(spec, "new/tokenizer.json").sha256
    _said("import", "hf", "--out", "bytes", "--preset", "nano", "--tokenizer", "byte")
    assert resolve(file=Path("bytes/run.toml")).data.tokenizer == "byte"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(HetnodeError, match="--tokenizer") as caught:
        _said("import", "hf", "--out", "none", "--preset", "nano")
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE


def test_a_tokenizer_that_is_too_large_is_not_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_TOKENIZER_LIMIT", 100)
    with pytest.raises(HetnodeError, match="larger than 100 bytes") as caught:
        tokenizer_of(inspect(folder))
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE


def _write_folder(folder: Path, stages: dict[int, dict[str, Tensor]], **config: Any) -> Path:
    """A folder with one weight file, as somebody else would write it."""
    folder.mkdir()
    tensors = {published_name(name): tensor for stage in stages.values() for name, tensor in stage.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tree = {**config_of(PLAIN.model, "float32", None), **config}
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def test_a_tied_embedding_becomes_a_head_of_its_own(tmp_path: Path) -> None:
    stages = random_model(PLAIN)
    head = stages[1].pop("head")
    folder = _write_folder(tmp_path / "hf", stages, tie_word_embeddings=True)
    assert inspect(folder).tied
    _import(folder, tmp_path / "new")
    found = _stages(tmp_path / "new" / "checkpoint")
    assert torch.equal(found[1]["head"], stages[0]["emb"])
    assert not torch.equal(found[1]["head"], head)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "Mistral"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "qwen2"}, "architectures"),
        ({"num_key_value_heads": 2}, "grouped-query"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"type": "default"}}, "yarn"),
        ({"rope_parameters": "dynamic"}, "dynamic"),
        ({"head_dim": 32}, "head_dim"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": -64}, "width"),
        ({"hidden_size": 2**40}, "width"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_hidden_layers": 4}, "lacks 9 tensors"),
        ({"num_hidden_layers": 2}, "which a plain Llama has not"),
        ({"vocab_size": "many"}, "vocabulary"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "heads"),
        ({"intermediate_size": 97}, "shape"),
        ({"max_position_embeddings": "long"}, "max_position"),
        ({"rms_norm_eps": 0}, "norm_epsilon"),
    ],
)
def test_a_model_that_is_not_ours_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    folder = _write_folder(tmp_path / "hf", random_model(PLAIN), **change)
    _assert_refused(folder, tmp_path / "new", word)


def _assert_refused(folder: Path, out: Path, word: str) -> None:
    with pytest.raises(HetnodeError, match=word) as caught:
        _import(folder, out)
    assert caught.value.code is ErrorCode.UNSUPPORTED_MODEL
    assert not out.exists()


def _with_a_bias(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors")


def _with_an_integer_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].int()
    save_file(tensors, folder / "model.safetensors")


def _with_a_value_that_is_not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _without_names(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": 7}}')


def _no_json(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def _a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (_with_a_bias, "bias"),
        (_with_an_integer_tensor, "I32"),
        (_with_a_value_that_is_not_finite, "finite"),
        (_truncated, "cannot be imported"),
        (_pickled, "bin"),
        (_elsewhere, "no file of the folder"),
        (_without_names, "weight_map"),
        (_no_json, "config.json"),
        (_a_list, "no JSON object"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], None], word: str) -> None:
    folder = _write_folder(tmp_path / "hf", random_model(PLAIN))
    damage(folder)
    _assert_refused(folder, tmp_path / "new", word)


def test_the_context_is_the_models_up_to_a_bound(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path / "hf", random_model(PLAIN), max_position_embeddings=131_072)
    assert inspect(folder).model["context"] == importing.MOST_CONTEXT
    assert inspect(folder, 512).model["context"] == 512


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ({"rope_parameters": {"rope_theta": 3.0}, "rope_theta": 7.0}, 3.0),
        ({"rope_parameters": None, "rope_theta": 7.0}, 7.0),
        ({"rope_parameters": {"rope_theta": 3.0}, "rope_scaling": {"rope_theta": 5.0}}, 5.0),
        ({"rope_parameters": {"rope_theta": 3.0}, "rope_scaling": {"type": "default"}}, 50_000.0),
    ],
)
def test_the_base_of_rope_is_the_one_that_transformers_takes(
    tmp_path: Path, config: dict[str, Any], base: float
) -> None:
    folder = _write_folder(tmp_path / "hf", random_model(PLAIN), **config)
    assert inspect(folder).model["rope_base"] == base


def test_an_earlier_export_is_replaced_and_nothing_else(run: Path, folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    export(global_model.verify(run), folder, DTYPES["bf16"], GB)
    assert sorted(path.name for path in folder.iterdir()) != before, "one file now"
    (folder / "thesis.tex").write_text("precious")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "file").touch()
    for place in (folder, tmp_path / "other", tmp_path / "file"):
        with pytest.raises(HetnodeError) as caught:
            export(global_model.verify(run), place, DTYPES["fp32"], GB)
        assert caught.value.code is ErrorCode.BAD_OPTION
    assert (folder / "thesis.tex").read_text() == "precious"


def test_a_full_disk_leaves_the_earlier_export(
    run: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    real = os.fsync
    calls = iter(range(100))

    def full(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HetnodeError) as caught:
        export(global_model.verify(run), folder, DTYPES["fp32"], 50_000)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert "checkpoint" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_leaves_nothing_of_an_import(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HetnodeError) as caught:
        _import(folder, tmp_path / "new")
    assert caught.value.code is ErrorCode.DISK_FULL
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_cannot_be_written_is_named(folder: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"
    for attempt in (
        lambda: export(global_model.verify(run), place, DTYPES["fp32"], GB),
        lambda: _import(folder, place),
    ):
        with pytest.raises(HetnodeError, match="below cannot be written") as caught:
            attempt()
        assert caught.value.code is ErrorCode.BAD_OPTION


@pytest.mark.parametrize("path", ["/home/jo/book.txt", "C:\\Users\\jo\\book.txt", "D:/own\\book.txt"])
def test_a_card_tells_no_path_of_any_system(path: str) -> None:
    spec = resolve("nano", overrides={"data.source": f"text:{path}", "data.tokenizer": path})
    data = spec_without_folders(spec)["data"]
    assert (data["source"], data["tokenizer"]) == ("text:book.txt", "book.txt")


def test_a_set_on_the_hub_keeps_its_name_and_a_local_one_does_not() -> None:
    kept = {
        source: spec_without_folders(resolve("nano", overrides={"data.source": source}))["data"]["source"]
        for source in ("hf:owner/set/en", "hf:C:\\own\\set", "hf:./own/set")
    }
    assert list(kept.values()) == ["hf:owner/set/en", "hf:set", "hf:set"]


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    stages = random_model(PLAIN)
    stages[1]["head"][0, 0] = 1e5
    global_model.write(tmp_path / "run", PLAIN, 1, stages)
    with pytest.raises(HetnodeError, match="lm_head") as caught:
        export(global_model.verify(tmp_path / "run"), tmp_path / "hf", DTYPES["fp16"], GB)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_that_lacks_a_stage_is_not_exported(tmp_path: Path) -> None:
    global_model.write(tmp_path / "part", PLAIN, 1, {1: random_model(PLAIN)[1]})
    with pytest.raises(HetnodeError, match="stage 0") as caught:
        export(global_model.verify(tmp_path / "part"), tmp_path / "hf", DTYPES["fp32"], GB)
    assert caught.value.code is ErrorCode.CHECKPOINT_MISSING


def _said(*arguments: str | Path) -> str:
    """What a command prints, run in this process. Raises as it does."""
    return str(CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout)


def test_the_commands_work_together(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = run.parent
    events = [
        {"event": "measurement", "round": 3, "replica": 0, "complete": True, "validation_loss": 2.125}
        | {"tokens": 777, "link_bytes_sent": 0, "link_bytes_dense": 0}
        | {"payload_bytes": 0, "payload_bytes_dense": 0}
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    _said("export", place, "hf", "--shard-size", "0.1MB")
    card = Path("hf/README.md").read_text()
    assert "| 0 | 2.1250 |" in card
    assert "| tokens seen | 777 |" in card
    assert "--config new/run.toml" in _said("import", "hf", "--out", "new", "--preset", "nano", "--k", "4")
    found = [json.loads(_said("eval", model, "--batches", "8", "--json")) for model in (place, "hf", "new")]
    assert found[0]["loss"] == found[2]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert (found[0]["tokens"], found[0]["mode"]) == (8 * 2 * 64, "uncompressed")
    assert "bits per byte" in _said("eval", "new", "--batches", "1", "--mode", "compressed")


def test_what_is_no_number_is_null_in_json(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.experiment.evaluate.evaluate", lambda *_: Evaluation(1e9, 5, 0))
    found = json.loads(_said("eval", run, "--json"))
    assert (found["loss"], found["perplexity"], found["bits_per_byte"]) == (1e9, None, None)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("export", "{run}", "x", "--format", "gguf"), ErrorCode.BAD_OPTION, "gguf"),
        (("export", "{run}", "x", "--dtype", "int3"), ErrorCode.BAD_OPTION, "int3"),
        (("export", "{run}", "x", "--shard-size", "big"), ErrorCode.BAD_OPTION, "big"),
        (("import", "{hf}", "--out", "x", "--preset", "178m"), ErrorCode.BAD_SPEC, "Give --k"),
        (("export", ".", "x"), ErrorCode.CHECKPOINT_MISSING, "no checkpoint"),
        (("import", ".", "--out", "x"), ErrorCode.UNSUPPORTED_MODEL, "config.json"),
        (("import", ".", "--out", "{run}"), ErrorCode.BAD_OPTION, "not empty"),
        (
            ("import", ".", "--out", "x", "--config", "given.toml", "--k", "8"),
            ErrorCode.BAD_OPTION,
            "settled",
        ),
        (("eval", "{run}", "--split", "some"), ErrorCode.BAD_OPTION, "held-out, all"),
        (("eval", "{run}", "--mode", "some"), ErrorCode.BAD_OPTION, "compressed"),
        (("eval", "{run}", "--data", "hf:x"), ErrorCode.BAD_OPTION, "--batches"),
        (("swarm", "up", "--config", "given.toml"), ErrorCode.CHECKPOINT_MISSING, "no checkpoint"),
    ],
)
def test_wrong_options_are_refused_in_words(
    run: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: ErrorCode,
    word: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.toml").write_text(resolve("nano", overrides={"initial": ["0" * 64, "1" * 64]}).toml)
    with pytest.raises(HetnodeError, match=word) as caught:
        _said(*(argument.format(run=run, hf=folder) for argument in arguments))
    assert caught.value.code is code
    assert not Path("x").exists()


@pytest.mark.slow
@pytest.mark.swarm
def test_a_real_swarm_starts_at_the_imported_models_loss(folder: Path, tmp_path: Path) -> None:
    spec = _import(folder, tmp_path / "new", rounds=2)
    command = [sys.executable, "-m", "node", "swarm", "up", "--config", "new/run.toml", "--folder", "swarm"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    events = map(json.loads, (tmp_path / "swarm" / "metrics.jsonl").read_text().splitlines())
    began = {
        event["replica"]: event["validation_loss"]
        for event in events
        if event["event"] == "measurement" and event["complete"] and event["round"] == 0
    }
    model = global_model.read(tmp_path / "new" / "checkpoint")
    for replica, mode in enumerate((Mode.UNCOMPRESSED, Mode.COMPRESSED)):
        found = evaluate(model, "builtin", mode=mode, batches=spec.data.validation_batches)
        assert began[replica] == pytest.approx(found.loss, rel=1e-5)
