"""Hugging Face folders that others wrote: what is read from them, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.hugging_face import importing
from node.hugging_face.importing import inspect
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.sections import ModelSpec
from tests.support.hugging_face import imported, output_of, stages_of, write_folder
from tests.support.models import PLAIN, random_model

SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
QWEN3_WITHOUT_HEAD_WIDTH = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": None}


def test_a_tied_embedding_becomes_a_head_of_its_own_in_a_run_of_several_stages(tmp_path: Path) -> None:
    stages = random_model(PLAIN)
    head = stages[1].pop("head")
    folder = write_folder(tmp_path / "hf", stages, tie_word_embeddings=True)
    assert inspect(folder).tied
    imported(folder, tmp_path / "new")
    found = stages_of(tmp_path / "new" / "checkpoint")
    assert torch.equal(found[1]["head"], stages[0]["emb"])
    assert not torch.equal(found[1]["head"], head)


def test_a_tied_embedding_stays_tied_in_a_run_of_one_stage(tmp_path: Path) -> None:
    stages = random_model(PLAIN)
    del stages[1]["head"]
    folder = write_folder(tmp_path / "hf", stages, tie_word_embeddings=True)
    given = ("import", folder, "--preset", "nano", "--set", "link.k=4", "--set", "data.tokenizer=byte")
    apart = output_of(*given, "--out", tmp_path / "apart")
    assert "trained apart" in apart
    assert "--set swarm.stages=1 --set swarm.pipelines=0" in apart
    one = (*given, "--set", "swarm.stages=1", "--set", "swarm.pipelines=0")
    assert "apart" not in output_of(*one, "--out", tmp_path / "tied")
    assert "apart" in output_of(*one, "--out", tmp_path / "two", "--set", "model.tied_head=false")
    specs = {name: resolve(file=tmp_path / name / "run.toml") for name in ("apart", "tied", "two")}
    assert {name: spec.model.tied_head for name, spec in specs.items()} == {
        "apart": False,
        "tied": True,
        "two": False,
    }
    assert {*stages_of(tmp_path / "two" / "checkpoint")[0]} - {
        *stages_of(tmp_path / "tied" / "checkpoint")[0]
    } == {"head"}
    for again in ("apart", "tied", "two"):  # another member of each run
        output_of(
            "import", folder, "--out", tmp_path / f"{again}-2", "--config", tmp_path / again / "run.toml"
        )
    with pytest.raises(HetnodeError, match=r"tied_head needs swarm\.stages 1") as caught:
        output_of(*given, "--out", tmp_path / "none", "--set", "model.tied_head=true")
    assert caught.value.code is ErrorCode.BAD_SPEC
    apart_hf = write_folder(tmp_path / "apart_hf", random_model(PLAIN))
    with pytest.raises(HetnodeError, match="its head is not its embedding") as caught:
        output_of("import", apart_hf, *one[2:], "--out", tmp_path / "none", "--set", "model.tied_head=true")
    assert caught.value.code is ErrorCode.UNSUPPORTED_MODEL


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "Gemma"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "qwen2"}, "architectures"),
        ({"model_type": ["llama"]}, "architectures"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "lacks 9 tensors"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "lacks 6 tensors"),
        (QWEN3_WITHOUT_HEAD_WIDTH, "no 'head_dim'"),
        ({"num_key_value_heads": 2}, "shape"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"num_key_value_heads": "all"}, "key_value_heads"),
        ({"attention_bias": True}, "lacks 12 tensors"),
        ({"attention_bias": "some"}, "qkv_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no 'low_freq_factor'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "no 'high_freq_factor'",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 8.0}},
            "another way than Llama 3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "rope_factor"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "another way"),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"type": "default"}}, "yarn"),
        ({"rope_parameters": "dynamic"}, "dynamic"),
        ({"head_dim": 32}, "shape"),
        ({"head_dim": 15}, "even"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": -64}, "width"),
        ({"hidden_size": 2**40}, "width"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_hidden_layers": 4}, "lacks 9 tensors"),
        ({"num_hidden_layers": 2}, "which is not part of this model"),
        ({"vocab_size": "many"}, "vocabulary"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "heads"),
        ({"intermediate_size": 97}, "shape"),
        ({"use_sliding_window": True, "sliding_window": 32}, "window of 32"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, "window of 32"),
        ({"layer_types": ["sliding_attention"], "sliding_window": "wide"}, "window of 'wide'"),
        ({"max_position_embeddings": "long"}, "max_position"),
        ({"rms_norm_eps": 0}, "norm_epsilon"),
        ({**SMOLLM3, "no_rope_layers": [1, 0, 1]}, "other layers than each fourth"),
        ({**SMOLLM3, "no_rope_layer_interval": 2}, "other layers than each fourth"),
        ({**SMOLLM3, "rope_scaling": {"type": "linear", "factor": 2.0}}, "another way"),
        (OLMO2, "input_layernorm.weight', which is not part of this model"),
        ({**OLMO2, "attention_bias": True}, "it has attention_bias"),
        ({**OLMO2, "hidden_act": "gelu"}, "gelu"),
        ({**OLMO2, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "another way"),
        ({**OLMO2, "layer_types": ["sliding_attention"], "sliding_window": 32}, "window of 32"),
        ({**OLMO2, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}, "Olmo3ForCausalLM"),
        ({**OLMO2, "architectures": ["OlmoForCausalLM"], "model_type": "olmo"}, "OlmoForCausalLM"),
    ],
)
def test_a_model_that_is_not_ours_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    folder = write_folder(tmp_path / "hf", random_model(PLAIN), **change)
    _assert_refused(folder, tmp_path / "new", word)


def _assert_refused(folder: Path, out: Path, word: str) -> None:
    with pytest.raises(HetnodeError, match=word) as caught:
        imported(folder, out)
    assert caught.value.code is ErrorCode.UNSUPPORTED_MODEL
    assert not out.exists()


def _with_a_bias(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors")


def test_a_bias_of_the_output_must_be_zero(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", random_model(PLAIN), attention_bias=True)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(PLAIN.model.layers):
        for each, width in (("q", 64), ("k", 64), ("v", 64), ("o", 64)):
            tensors[f"model.layers.{layer}.self_attn.{each}_proj.bias"] = torch.zeros(width)
    save_file(tensors, folder / "model.safetensors")
    imported(folder, tmp_path / "good")
    tensors["model.layers.1.self_attn.o_proj.bias"][5] = 1e-3
    save_file(tensors, folder / "model.safetensors")
    _assert_refused(folder, tmp_path / "new", "layers.1.self_attn.o_proj.bias is not zero")


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
        (_elsewhere, "not a file of the folder"),
        (_without_names, "weight_map"),
        (_no_json, "config.json"),
        (_a_list, "not a JSON object"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], None], word: str) -> None:
    folder = write_folder(tmp_path / "hf", random_model(PLAIN))
    damage(folder)
    _assert_refused(folder, tmp_path / "new", word)


def test_the_config_of_olmo2_1b_is_read_and_what_it_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig  # noqa: PLC0415  collecting needs none

    sizes = {"vocab_size": 100_352, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16}
    usual = {**OLMO2, **sizes, "intermediate_size": 8192, "max_position_embeddings": 4096}
    told = {"num_key_value_heads": 16, "rope_scaling": None, "rope_theta": 500_000, "rms_norm_eps": 1e-6}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**usual, **told, "attention_bias": False, "hidden_act": "silu"}))
    model = ModelSpec(**inspect(tmp_path, 4096).model)
    assert (model.norms, model.qk_norm, model.head_width, model.key_value_heads) == (
        "outputs",
        False,
        128,
        16,
    )
    assert (model.norm_epsilon, model.rope_base) == (1e-6, 500_000.0)
    tables = 2 * model.vocabulary * model.width
    assert tables + model.layers * model.layer_parameters + model.width == 1_484_916_736  # "1B", as published
    path.write_text(json.dumps(usual))
    theirs, model = AutoConfig.from_pretrained(tmp_path), ModelSpec(**inspect(tmp_path).model)
    assert model.norm_epsilon == theirs.rms_norm_eps
    assert model.rope_base == theirs.rope_parameters["rope_theta"]
    assert model.key_value_heads == theirs.num_key_value_heads


def test_the_context_is_the_models_up_to_a_bound(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", random_model(PLAIN), max_position_embeddings=131_072)
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
    folder = write_folder(tmp_path / "hf", random_model(PLAIN), **config)
    assert inspect(folder).model["rope_base"] == base
