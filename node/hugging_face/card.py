"""The model card: what a stranger should know about a model before using it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PAPER = "[Heterogeneous Low-Bandwidth Pre-Training of LLMs](https://arxiv.org/abs/2601.02360)"


@dataclass(frozen=True)
class Facts:
    """What the card tells.

    Attributes:
        spec: of the run, without the places of one machine.
        dtype: element type of the weights, in torch's words.
        tokens: that were trained on by all replicas together, as measured; 0 where that is unknown.
        losses: validation loss (nats per token) after `round`, by replica, each in its own forward mode.
    """

    spec: Mapping[str, Any]
    run_id: str
    spec_hash: str
    round_number: int
    dtype: str
    tokens: int
    losses: Mapping[int, float]


def card(facts: Facts) -> str:
    """The text of ``README.md``, with the front matter that the Hub reads."""
    spec = facts.spec
    return f"""---
{_front_matter(spec["data"])}
---
# {facts.run_id}

A decoder-only language model (Llama architecture), pre-trained with **hetnode** by machines that do not
share a datacenter. The method is that of {_PAPER}:
full replicas, and pipeline replicas with projected activations, take H AdamW steps, then exchange quantized
top-k pseudo-gradients, and all of them hold the same parameters after it.

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

It is a base model: it continues text, was not tuned to follow instructions or to be harmless, and repeats
what its data says. It was trained on contexts of {spec["model"]["context"]} tokens.

`hetnode_run.json` has the whole specification of the run and the digests of its parameters. Names of files in
it are without the folders in which they lay; the hash above is that of the specification with them.
"""


def _table_of_facts(facts: Facts) -> str:
    spec = facts.spec
    model, data, swarm = spec["model"], spec["data"], spec["swarm"]
    rows = {
        "run": f"`{facts.run_id}`, after round {facts.round_number} of {spec['rounds']}",
        "specification": f"`{facts.spec_hash}` (sha-256)",
        "parameters": f"{_parameters(model):,}, {facts.dtype}",
        "shape": (
            f"{model['layers']} layers, width {model['width']}, {model['heads']} heads, feed-forward "
            f"{model['feed_forward']}, context {model['context']}, vocabulary {model['vocabulary']}"
        ),
        "data": f"`{data['source']}`",
        "tokenizer": _tokenizer(data),
        "tokens seen": _tokens(facts),
        "swarm": (
            f"{swarm['replicas']} full replicas, {swarm['pipelines']} pipeline replicas of {swarm['stages']} "
            "stages, as planned"
        ),
        "H, inner steps per round": str(spec["inner"]["steps"]),
        "links": _links(spec),
        "started from": "given parameters, imported" if spec.get("initial") else "random parameters",
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _front_matter(data: Mapping[str, Any]) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    lines += ["- hetnode", "- llama", "- decentralized-training"]
    kind, _, name = data["source"].partition(":")
    if kind == "hf" and "/" in name:
        lines += ["datasets:", f"- {'/'.join(name.split('/')[:2])}"]
    return "\n".join(lines)


def _parameters(model: Mapping[str, int]) -> int:
    width = model["width"]
    layer = 4 * width**2 + 3 * width * model["feed_forward"] + 2 * width
    return 2 * model["vocabulary"] * width + model["layers"] * layer + width


def _tokenizer(data: Mapping[str, Any]) -> str:
    if data["tokenizer"] == "byte":
        return "UTF-8 bytes, no special tokens; documents are separated by a newline"
    return f"`{data['tokenizer']}`, sha-256 `{data['tokenizer_sha256']}`"


def _tokens(facts: Facts) -> str:
    if facts.tokens:
        return f"{facts.tokens:,}"
    spec, inner, swarm = facts.spec, facts.spec["inner"], facts.spec["swarm"]
    per_round = inner["steps"] * inner["microbatches"] * inner["microbatch_size"] * spec["model"]["context"]
    replicas = swarm["replicas"] + swarm["pipelines"]
    return (
        f"{facts.round_number * per_round * replicas:,} as planned (the run's measurements were not at hand)"
    )


def _links(spec: Mapping[str, Any]) -> str:
    if not spec["swarm"]["pipelines"]:
        return "none"
    link, width = spec["link"], spec["model"]["width"]
    return f"k = {link['k'] or width} of d = {width}, {link['dtype']}"


def _losses(facts: Facts) -> str:
    spec = facts.spec
    windows = spec["data"]["validation_batches"] * spec["inner"]["microbatch_size"]
    how = (
        f"Mean cross-entropy in nats per token over {windows} windows of {spec['model']['context']} tokens,\n"
        "held out of the same data. Each replica is measured in its own forward mode: a full replica\n"
        "plainly, a pipeline replica through its compressed links. What transformers computes with this\n"
        "folder is the plain mode."
    )
    if not facts.losses:
        return f"The run's measurements were not at hand at export.\n\n{how}"
    rows = "\n".join(
        f"| {replica} | {loss:.4f} | {math.exp(min(loss, 700)):.4g} |"
        for replica, loss in sorted(facts.losses.items())
    )
    table = f"| replica | loss | perplexity |\n|---|---|---|\n{rows}"
    return f"After round {facts.round_number}, as the run measured it:\n\n{table}\n\n{how}"
