"""The model card: facts about a model for people who do not know the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.data.hub import PRESETS
from node.hugging_face.architecture import model_type_of
from protocol.run_files.link_text import dtype_text, width_text
from protocol.spec.data import DataSource, DataSpec, listed
from protocol.spec.run import RunSpec
from protocol.spec.sections import ModelSpec

LOCAL = "local"
"""Stands in the place of a folder's name in a source of data."""
_PAPER = "[Heterogeneous Low-Bandwidth Pre-Training of LLMs](https://arxiv.org/abs/2601.02360)"


@dataclass(frozen=True)
class Measured:
    """What is known of the run's own measurements up to the round of the checkpoint.

    Attributes:
        losses: validation loss (nats per token) after that round, by replica, each in its own forward mode.
        tokens: all tokens that all replicas trained on; 0 if unknown.
    """

    losses: Mapping[int, float]
    tokens: int


@dataclass(frozen=True)
class CardFacts:
    """The content of the card.

    Attributes:
        data: the data section of `spec` without folders of a machine.
        dtype: name of the element type of the weights, as in torch.
        base: name on the hub of the model from which the run started; None if it is unknown.
    """

    spec: RunSpec
    data: DataSpec
    round_number: int
    dtype: str
    measured: Measured
    base: str | None = None


_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


def card(facts: CardFacts) -> str:
    """The text of ``README.md``, with the front matter for the Hugging Face Hub."""
    return f"""---
{_front_matter(facts)}
---
# {facts.spec.name}

A decoder-only language model ({_architecture(facts.spec.model)}), pre-trained with **hetnode** by
machines that do not share a datacenter. The method is that of {_PAPER}:
full replicas, and pipeline replicas with projected activations, take H steps of
{_OPTIMIZERS[facts.spec.inner.optimizer]}, then exchange quantized top-k pseudo-gradients. After the
exchange all replicas have the same parameters.

| | |
|---|---|
{_table_of_facts(facts)}

## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
ids = tokenizer("def ", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50, do_sample=False)[0]))
```

No remote code is needed. `hetnode import` starts another run from it.

## Loss

{_losses(facts)}

## Limits

This is a base model: it continues text. It was not tuned to follow instructions or to be harmless, and it can
repeat its training data. It was trained on contexts of {facts.spec.model.context} tokens.

`hetnode_run.json` has the whole specification of the run and the digests of its parameters. Its file names
are without folders; the hash above is that of the specification with folders.
"""


def _table_of_facts(facts: CardFacts) -> str:
    spec = facts.spec
    model, swarm = spec.model, spec.swarm
    parameters = spec.parameters
    rows = {
        "run": f"`{spec.name}`, after round {facts.round_number} of {spec.rounds}",
        "specification": f"`{spec.hash}` (sha-256)",
        "parameters": f"{parameters:,}, {facts.dtype}",
        "shape": (
            f"{model.layers} layers, width {model.width}, {model.heads} heads, feed-forward "
            f"{model.feed_forward}, context {model.context}, vocabulary {model.vocabulary}"
        ),
        "data": ", before that ".join(map(_mixture, _phases(facts.data))),
        "tokenizer": _tokenizer(facts.data),
        "tokens seen": _tokens(facts),
        "swarm": (
            f"{swarm.replicas} full replicas, {swarm.pipelines} pipeline replicas of {swarm.stages} stages, "
            "as planned"
        ),
        "H, inner steps per round": str(spec.inner.steps),
        "links": _links(spec),
        "started from": _start(facts),
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _front_matter(facts: CardFacts) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    lines += [f"base_model: {facts.base}"] if facts.base else []
    kind = _architecture(facts.spec.model).partition(" ")[0].lower()
    lines += ["tags:", "- hetnode", f"- {kind}", "- decentralized-training"]
    places = [each.source for phase in _phases(facts.data) for each in phase if not _is_local(each)]
    names = [place.removeprefix("hf:") for place in places if place.startswith("hf:")]
    owned = [PRESETS[name][0] if name in PRESETS else "/".join(name.split("/")[:2]) for name in names]
    if owned:
        lines += ["datasets:", *(f"- {each}" for each in dict.fromkeys(owned))]
    return "\n".join(lines)


def _phases(data: DataSpec) -> list[tuple[DataSource, ...]]:
    """What was trained, the last first."""
    return [data.sources, *(listed(each.source) for each in reversed(data.past or ()))]


def _mixture(sources: Sequence[DataSource]) -> str:
    whole = sum(each.weight for each in sources)
    return " + ".join(
        f"{100 * each.weight / whole:.3g} % " * bool(each.name)
        + ("a folder that is not public" if _is_local(each) else f"`{each.source}`")
        for each in sources
    )


def _measured_on(data: DataSpec) -> str:
    return f"of {_mixture(listed(data.validation))}" if data.validation else "held out of the same data"


def _is_local(source: DataSource) -> bool:
    _, _, place = source.source.partition(":")
    return place == LOCAL or (place.startswith("./") and place.endswith(f"/{LOCAL}"))


def _architecture(model: ModelSpec) -> str:
    kind = model_type_of(model)
    if kind == "llama" and model.qkv_bias:
        return "Qwen2 architecture, stored as a Llama with biases"
    names = {"llama": "Llama", "qwen3": "Qwen3", "smollm3": "SmolLM3", "olmo2": "OLMo2"}
    return f"{names[kind]} architecture"


def _start(facts: CardFacts) -> str:
    if facts.base:
        return f"[{facts.base}](https://huggingface.co/{facts.base})"
    return "given parameters, imported" if facts.spec.initial else "random parameters"


def _tokenizer(data: DataSpec) -> str:
    if data.tokenizer == "byte":
        return "UTF-8 bytes, no special tokens; documents are separated by a newline"
    return f"`{data.tokenizer}`, sha-256 `{data.tokenizer_sha256}`"


def _tokens(facts: CardFacts) -> str:
    if facts.measured.tokens:
        return f"{facts.measured.tokens:,}"
    spec, inner = facts.spec, facts.spec.inner
    per_round = inner.steps * inner.microbatches * inner.microbatch_size * spec.model.context
    planned = facts.round_number * per_round * (spec.swarm.replicas + spec.swarm.pipelines)
    return f"{planned:,} as planned (the run's measurements were not available)"


def _links(spec: RunSpec) -> str:
    if not spec.swarm.pipelines:
        return "none"
    return f"{width_text(spec.link.possible_ks, spec.model.width)}, {dtype_text(spec.link)}"


def _losses(facts: CardFacts) -> str:
    spec, losses = facts.spec, facts.measured.losses
    windows = spec.data.validation_batches * spec.inner.microbatch_size
    how = (
        f"Mean cross-entropy in nats per token over {windows} windows of {spec.model.context} tokens,\n"
        f"{_measured_on(facts.data)}. Each replica is measured in its own forward mode: a full replica\n"
        "without compression, a pipeline replica through its compressed links. transformers computes\n"
        "the loss of this folder without compression."
    )
    if not losses:
        return f"The run's measurements were not available at export.\n\n{how}"
    rows = "\n".join(
        f"| {replica} | {loss:.4f} | {math.exp(min(loss, 700)):.4g} |"
        for replica, loss in sorted(losses.items())
    )
    table = f"| replica | loss | perplexity |\n|---|---|---|\n{rows}"
    return f"After round {facts.round_number}, as measured by the run:\n\n{table}\n\n{how}"
