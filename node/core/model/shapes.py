"""The parameters of a stage: their canonical names, order and shapes.

Stage 0 also holds the token embedding ``emb``, the last stage the final norm ``norm_f`` and the ``head``.
With `model.tied_head` ``emb`` is the head, too, and its gradient is the sum of both.
Layer numbers in names are global, so a name means the same tensor for every number of stages.
"""

from __future__ import annotations

from protocol.math.payload_layout import PayloadLayout
from protocol.spec.run import RunSpec
from protocol.spec.sections import ModelSpec

EMBEDDING = "emb"


def block_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one block's parameters, in canonical order."""
    d, f, q, k = model.width, model.feed_forward, model.query_width, model.key_width
    biases = {"bq": (q,), "bk": (k,), "bv": (k,)} if model.qkv_bias else {}
    norms = {name: (n,) for name, n in zip(("norm_q", "norm_k"), model.query_key_norms, strict=False)}
    return {
        "norm1": (d,),
        "wq": (q, d),
        "wk": (k, d),
        "wv": (k, d),
        **biases,
        **norms,
        "wo": (d, q),
        "norm2": (d,),
        "w_gate": (f, d),
        "w_up": (f, d),
        "w_down": (d, f),
    }


def parameter_shapes(spec: RunSpec, stage: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of `stage` by name, in canonical order. ValueError for an unknown stage."""
    model = spec.model
    shapes: dict[str, tuple[int, ...]] = {}
    if stage == 0:
        shapes |= embedding_shapes(spec)
    for layer in spec.layers_of(stage):
        shapes |= {f"{layer}.{name}": shape for name, shape in block_shapes(model).items()}
    if stage == spec.swarm.stages - 1:
        shapes |= {"norm_f": (model.width,)}
        shapes |= {} if model.tied_head else {"head": (model.vocabulary, model.width)}
    return shapes


def embedding_shapes(spec: RunSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of the token embedding, which members without stage 0 keep separately."""
    return {EMBEDDING: (spec.model.vocabulary, spec.model.width)}


def link_table_shapes(spec: RunSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the token table that a member behind a link trains for itself (model.link_table)."""
    return {"rows": (spec.link.table_rows or spec.model.vocabulary, spec.model.width)}


def is_of_layer(name: str, dimensions: int) -> bool:
    """Whether a parameter is a matrix of a layer, which the optimizer Muon turns."""
    return dimensions == 2 and "." in name


def payload_layout(spec: RunSpec, stage: int) -> PayloadLayout:
    """The form of every payload of `stage`. ValueError for an unknown stage."""
    return PayloadLayout(parameter_shapes(spec, stage), spec.outer)
