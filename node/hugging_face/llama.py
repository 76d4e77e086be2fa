"""A run's model as the Llama of transformers: the names of its tensors, and ``config.json``.

The layouts are equal: weights [out, in], RoPE in the half-split convention, heads in rows of the projections.
So only the names of tensors change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.sections import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"

_WHOLE = {"emb": "model.embed_tokens.weight", "norm_f": "model.norm.weight", "head": "lm_head.weight"}
_OF_LAYER = {
    "norm1": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}
_SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
}


def published_name(name: str) -> str:
    """The name in transformers of the tensor with this canonical name (node.model.init)."""
    if name in _WHOLE:
        return _WHOLE[name]
    layer, _, short = name.partition(".")
    return f"model.layers.{layer}.{_OF_LAYER[short]}.weight"


def config_of(model: ModelSpec, dtype: str, end: int | None) -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        dtype: name of the element type of the weights, as in torch.
        end: id of the end-of-text token, or None.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": model.heads,
        "head_dim": model.head_width,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        # transformers 5 reads rope_parameters and dtype, version 4 rope_theta and torch_dtype.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "rope_theta": model.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def model_of(config: Mapping[str, Any], context: int, path: Path) -> tuple[dict[str, Any], bool]:
    """The fields of `ModelSpec` for a ``config.json``, and whether its embeddings are tied.

    Args:
        config: untrusted.
        context: tokens of a sample in the new run.
        path: of the file, for messages.

    Raises:
        HetnodeError: UNSUPPORTED_MODEL if `node.model.llama` does not have this architecture, or a run
            cannot have these sizes.
    """
    for problem in _problems(config):
        raise unsupported(path, problem)
    try:
        fields = {ours: config[theirs] for ours, theirs in _SIZES.items()}
    except KeyError as error:
        raise unsupported(path, f"it has no {error}") from None
    rope = next(iter(_ropes(config)), {})
    fields |= {
        "context": context,
        "rope_base": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
    }
    try:
        model = ModelSpec.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise unsupported(path, f"{where or 'model'}: {first['msg'].removeprefix('Value error, ')}") from None
    if config.get("head_dim") not in (None, model.head_width):
        raise unsupported(
            path, f"head_dim {config['head_dim']!r:.40} is not hidden_size / heads, {model.head_width}"
        )
    return model.model_dump(), config.get("tie_word_embeddings", False)


def unsupported(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.UNSUPPORTED_MODEL,
        f"{path} cannot be imported: {why}.",
        "Give a complete folder of a LlamaForCausalLM model in safetensors, with as many key as query heads, "
        "without biases and without RoPE scaling.",
    )


def _problems(config: Mapping[str, Any]) -> list[str]:
    """Each property of the architecture that hetnode cannot represent, as a clause of a message."""
    found = []
    if config.get("architectures") != [ARCHITECTURE] or config.get("model_type") != "llama":
        found.append(f"its architectures are {config.get('architectures')!r:.80}, not {ARCHITECTURE}")
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if keys not in (None, heads):
        found.append(f"it has {keys!r:.20} key-value heads for {heads!r:.20} heads (grouped-query attention)")
    found += [f"it has {name}" for name in ("attention_bias", "mlp_bias") if config.get(name)]
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"its hidden_act is {config['hidden_act']!r:.40}, not silu")
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            found.append(f"it scales RoPE ({kind!r:.40})")
    if config.get("quantization_config"):
        found.append("its weights are quantized")
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        found.append("tie_word_embeddings is neither true nor false")
    return found


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The declared parameters of RoPE. If there are two, the first is what transformers uses."""
    found = [named for name in ("rope_scaling", "rope_parameters") if (named := config.get(name))]
    return [named if isinstance(named, dict) else {"rope_type": str(named)} for named in found]
