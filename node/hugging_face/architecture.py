"""A run's model as a model of transformers: the names of its tensors, and ``config.json``.

The layouts are equal: weights [out, in], RoPE in the half-split convention, heads in rows of the projections.
So only the names of tensors change. A model with norms of queries and keys is exported as Qwen3, one without
RoPE in some layers as SmolLM3, one with norms of the outputs as OLMo2, where a layer has no input_layernorm.
Any other one is exported as Llama, to which a Mistral without a sliding window is equal.
So is a Qwen2: it is a Llama with biases, of which that of the output is zero. AutoTokenizer of transformers 5
changes the ids of a Qwen2's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.fixed import ROPE_TURNS
from protocol.spec.sections import ModelSpec

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
"""The architectures by their `model_type`."""

_WHOLE = {"emb": "model.embed_tokens.weight", "norm_f": "model.norm.weight", "head": "lm_head.weight"}
_OF_LAYER = {
    "norm1": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "norm_q": "self_attn.q_norm.weight",
    "norm_k": "self_attn.k_norm.weight",
    "wo": "self_attn.o_proj.weight",
    "norm2": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
_NORMS_OF_OUTPUTS = {
    "norm1": "post_attention_layernorm.weight",
    "norm2": "post_feedforward_layernorm.weight",
}
_SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
}
_TURNS = dict(zip(("low_freq_factor", "high_freq_factor"), ROPE_TURNS, strict=True))
_CONTEXT = "original_max_position_embeddings"


def published_name(name: str, model: ModelSpec) -> str:
    """The name in transformers of the tensor of `model` with this canonical name (node.core.model.shapes)."""
    if name in _WHOLE:
        return _WHOLE[name]
    layer, _, short = name.partition(".")
    of_layer = _OF_LAYER | (_NORMS_OF_OUTPUTS if model.norms == "outputs" else {})
    return f"model.layers.{layer}.{of_layer[short]}"


def output_biases(model: ModelSpec) -> list[str]:
    """Names in transformers of tensors [width] that are zero: Llama has all biases of attention or none."""
    layers = range(model.layers) if model.qkv_bias else ()
    return [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in layers]


def model_type_of(model: ModelSpec) -> str:
    """The `model_type` of an export."""
    if model.norms == "outputs":
        return "olmo2"
    return "qwen3" if model.qk_norm else "smollm3" if model.rope_scaling == "smollm3" else "llama"


def config_of(model: ModelSpec, dtype: str, end: int | None) -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        dtype: name of the element type of the weights, as in torch.
        end: id of the end-of-text token, or None.
    """
    kind = model_type_of(model)
    rope, turning = _rope_of(model), map(model.has_rope, range(model.layers))
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_width,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        # transformers 5 reads rope_parameters and dtype; version 4 the other names.
        "rope_parameters": {"rope_theta": model.rope_base, **rope},
        "rope_theta": model.rope_base,
        **({"rope_scaling": rope} if rope["rope_type"] != "default" else {}),
        **({"no_rope_layers": [*map(int, turning)]} if kind == "smollm3" else {}),
        "hidden_act": "silu",
        "attention_bias": model.qkv_bias,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied_head,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _rope_of(model: ModelSpec) -> dict[str, Any]:
    if model.rope_scaling in ("none", "smollm3"):
        return {"rope_type": "default"}
    fields: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        fields |= {**_TURNS, _CONTEXT: model.rope_context}
    return fields


def model_of(config: Mapping[str, Any], context: int, path: Path) -> tuple[dict[str, Any], bool]:
    """The fields of `ModelSpec` for a ``config.json``, and whether its embeddings are tied.

    Args:
        config: untrusted.
        context: tokens of a sample in the new run.
        path: of the file, for messages.

    Raises:
        HetnodeError: UNSUPPORTED_MODEL if `node.core.model.llama` does not have this architecture, or a run
            cannot have these sizes.
    """
    for problem in _problems(config, context):
        raise unsupported(path, problem)
    try:
        fields = {ours: config[theirs] for ours, theirs in _SIZES.items()} | _heads(config)
        fields |= _rope_fields(next(iter(_ropes(config)), {}), config)
    except KeyError as error:
        raise unsupported(path, f"it has no {error}") from None
    kind = config["model_type"]
    fields |= {
        "context": context,
        "norm_epsilon": config.get("rms_norm_eps", 1e-5 if kind == "olmo2" else 1e-6),
        "norms": "outputs" if kind == "olmo2" else "inputs",
        "qkv_bias": kind == "qwen2" or config.get("attention_bias", False),
        "qk_norm": kind == "qwen3",
    }
    try:
        model = ModelSpec.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise unsupported(path, f"{where or 'model'}: {first['msg'].removeprefix('Value error, ')}") from None
    # With the defaults, which a run's JSON leaves out: they replace what a preset or a run file says.
    names = [name for name in ModelSpec.model_fields if name != "tied_head"]  # the run chooses that
    is_tied = config.get("tie_word_embeddings", kind == "smollm3")
    return {name: getattr(model, name) for name in names}, is_tied


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the heads. KeyError where the architecture has another default than Llama's."""
    if config["model_type"] in ("llama", "olmo2"):
        config = {"num_key_value_heads": None, **config}
    found = {"key_value_heads": config["num_key_value_heads"], "head_width": config.get("head_dim")}
    given = {name: value for name, value in found.items() if value is not None}
    if config["model_type"] == "qwen3" and "head_width" not in given:
        raise KeyError("head_dim")
    return given


def _rope_fields(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of RoPE. KeyError if one of its kind is missing."""
    is_smollm3 = config["model_type"] == "smollm3"
    usual = 2_000_000.0 if is_smollm3 else 10_000.0
    found = {"rope_base": rope.get("rope_theta", config.get("rope_theta", usual))}
    found |= {"rope_scaling": "smollm3"} if is_smollm3 else {}
    kind = _kind_of(rope)
    if kind != "default":
        found |= {"rope_scaling": kind, "rope_factor": rope["factor"]}
    if kind == "llama3":
        found |= {"rope_context": rope[_CONTEXT]}
    return found


def unsupported(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.UNSUPPORTED_MODEL,
        f"{path} cannot be imported: {why}.",
        "Give a complete folder of a Llama, Mistral, Qwen2, Qwen3, SmolLM3 or OLMo2 model in safetensors. "
        "Biases of other projections, sliding windows below model.context, and other kinds of RoPE are not "
        "supported.",
    )


def _problems(config: Mapping[str, Any], context: int) -> list[str]:
    """Each property of the architecture that hetnode cannot represent, as a clause of a message."""
    found = []
    kind = config.get("model_type")
    if not isinstance(kind, str) or config.get("architectures") != [_CLASSES.get(kind)]:
        known = ", ".join(_CLASSES.values())
        found.append(f"its architectures are {config.get('architectures')!r:.80}, not one of {known}")
    if problem := _window_problem(config, context):
        found.append(problem)
    biases = ("mlp_bias",) if kind in ("llama", "smollm3") else ("attention_bias", "mlp_bias")
    found += [f"it has {name}" for name in biases if config.get(name)]
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"its hidden_act is {config['hidden_act']!r:.40}, not silu")
    for rope in _ropes(config):
        kinds = ("default",) if kind == "smollm3" else _ROPES
        if _kind_of(rope) not in kinds or rope.get("partial_rotary_factor", 1.0) != 1.0:
            found.append(f"it stretches RoPE in another way ({_kind_of(rope)!r:.40})")
        elif _kind_of(rope) == "llama3" and (lacks := [name for name in _TURNS if name not in rope]):
            found.append(f"it has no {lacks[0]!r}")
        elif _kind_of(rope) == "llama3" and (turns := {name: rope[name] for name in _TURNS}) != _TURNS:
            found.append(f"it stretches RoPE in another way than Llama 3: {turns!r:.80}")
    turning = config.get("no_rope_layers") or []
    is_usual = isinstance(turning, list) and turning == [int(n % 4 < 3) for n in range(len(turning))]
    if kind == "smollm3" and not (is_usual and config.get("no_rope_layer_interval", 4) == 4):
        found.append("it has no RoPE in other layers than each fourth")
    if config.get("quantization_config"):
        found.append("its weights are quantized")
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        found.append("tie_word_embeddings is neither true nor false")
    return found


def _window_problem(config: Mapping[str, Any], context: int) -> str:
    """Why attention would not see the whole context; "" if it does."""
    layers = config.get("layer_types")
    slides = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if isinstance(layers, list):
        slides = any(each != "full_attention" for each in layers)
    window = config.get("sliding_window")
    if not slides or window is None or (type(window) is int and window >= context):
        return ""
    return f"its attention sees a window of {window!r:.40} tokens only, and the context is {context}"


_ROPES = ("default", "linear", "llama3")


def _kind_of(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The declared parameters of RoPE. If there are two, the first is what transformers uses."""
    found = [named for name in ("rope_scaling", "rope_parameters") if (named := config.get(name))]
    return [named if isinstance(named, dict) else {"rope_type": str(named)} for named in found]
