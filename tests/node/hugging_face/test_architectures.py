"""Models of current architectures: transformers makes them, hetnode imports, trains and exports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from node.checkpoint import global_model
from node.checkpoint.initial import initial_from
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.data.stream import open_stream
from node.experiment.in_process_replica import LocalReplica, plan_of
from node.generate import next_token_loss, whole_model
from node.hugging_face.export import export
from node.hugging_face.importing import inspect
from node.hugging_face.weights import DTYPES
from protocol.spec.run import RunSpec
from tests.support.hugging_face import GB, imported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-4,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED = {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 500.0}
SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SMOLLM3 = {"num_hidden_layers": 9, **SPECIAL}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4}),
    "llama 2 70b": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": STRETCHED}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}}),
    "llama 3.2, tied": ("llama", {"rope_parameters": STRETCHED, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "rope_parameters": STRETCHED}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral, window": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {**SMOLLM3, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {**SPECIAL, "num_key_value_heads": 4}),
    "olmo2, grouped, stretched": ("olmo2", {**SPECIAL, "head_dim": 24, "rope_parameters": STRETCHED}),
    "olmo2, tied": ("olmo2", {**SPECIAL, "tie_word_embeddings": True}),
    "smollm3, apart, biases": ("smollm3", {**SMOLLM3, "tie_word_embeddings": False, "attention_bias": True}),
}


def published(kind: str, folder: Path, **config: Any) -> PreTrainedModel:
    """A random model of transformers, written to `folder`; no parameter has the value it begins with."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  collecting needs none

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **config})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.mean() == 1 else 0.2 * noise)
            if name.endswith("o_proj.bias"):  # a run has none
                parameter.zero_()
    model.save_pretrained(folder)
    return model


def logits(model: Callable[[Tensor], Any], ids: Tensor) -> Tensor:
    with torch.inference_mode():
        found = model(ids)
        return found if isinstance(found, Tensor) else found.logits


def load(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_published_model_is_imported_trained_in_a_pipeline_and_exported(name: str, tmp_path: Path) -> None:
    kind, config = ARCHITECTURES[name]
    theirs = published(kind, tmp_path / "hf", **config)
    ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    spec = imported(tmp_path / "hf", tmp_path / "new", **{"swarm.stages": 3, "link.k": 16})
    ours = logits(whole_model(global_model.read(tmp_path / "new" / "checkpoint")), ids)
    assert ours.std() > 0.5, "logits of a size that a trained model has"
    assert (ours - logits(theirs, ids)).abs().max() < 1e-4
    loss = float(next_token_loss(ours[:, :-1], ids[:, 1:]))
    assert theirs(ids, labels=ids).loss.item() == pytest.approx(loss, rel=1e-6)
    assert RunSpec.from_json(spec.canonical_json) == spec

    pipeline = plan_of(spec).replicas[1]
    assert len(pipeline.members) == 3
    replica = LocalReplica(
        spec, pipeline, Compute(), open_stream(spec), TrainerFactories(initial=initial_from(tmp_path / "new"))
    )
    before = replica.validate()
    replica.begin_round(1, range(spec.samples_per_round()))
    replica.train(range(spec.inner.steps))
    assert replica.validate() < before

    export(global_model.verify(tmp_path / "new" / "checkpoint"), tmp_path / "back", DTYPES["fp32"], GB)
    assert inspect(tmp_path / "back").model == inspect(tmp_path / "hf").model
    came, went = (load_file(tmp_path / each / "model.safetensors") for each in ("hf", "back"))
    assert all(torch.equal(went[name], tensor) for name, tensor in came.items())
    assert (logits(load(tmp_path / "back"), ids) - ours).abs().max() < 1e-4


@pytest.mark.parametrize(
    "name", [name for name, (_, config) in ARCHITECTURES.items() if config.get("tie_word_embeddings")]
)
def test_a_tied_model_is_trained_tied_by_full_replicas_and_exported_tied(name: str, tmp_path: Path) -> None:
    kind, config = ARCHITECTURES[name]
    theirs = published(kind, tmp_path / "hf", **config)
    ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    shape = {"swarm.stages": 1, "swarm.pipelines": 0, "swarm.replicas": 2, "model.tied_head": True}
    spec = imported(tmp_path / "hf", tmp_path / "new", **shape)
    assert RunSpec.from_json(spec.canonical_json) == spec
    assert spec.parameters_of(0) == theirs.num_parameters()
    ours = logits(whole_model(global_model.read(tmp_path / "new" / "checkpoint")), ids)
    assert (ours - logits(theirs, ids)).abs().max() < 1e-4

    factories = TrainerFactories(initial=initial_from(tmp_path / "new"))
    replicas = [
        LocalReplica(spec, each, Compute(), open_stream(spec), factories) for each in plan_of(spec).replicas
    ]
    before, payloads = replicas[0].validate(), []
    for index, replica in enumerate(replicas):
        first = index * spec.samples_per_round()
        replica.begin_round(1, range(first, first + spec.samples_per_round()))
        replica.train(range(spec.inner.steps))
        payloads.append(replica.propose([0])[0])
    digests = [replica.settle(1, [([(each, 1.0) for each in payloads], True)]) for replica in replicas]
    assert digests[0] == digests[1]
    assert replicas[0].validate() < before

    stage = {0: replicas[0].host_of(0).outer[0].anchor}
    global_model.write(tmp_path / "trained", spec, 1, stage.items())
    export(global_model.verify(tmp_path / "trained"), tmp_path / "back", DTYPES["fp32"], GB)
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")
    back = load(tmp_path / "back")
    assert back.config.tie_word_embeddings
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight
    trained = logits(whole_model(global_model.read(tmp_path / "trained")), ids)
    assert (logits(back, ids) - trained).abs().max() < 1e-4
    assert (trained - ours).abs().max() > 1e-3
    assert inspect(tmp_path / "back").tied
