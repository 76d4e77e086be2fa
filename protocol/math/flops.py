"""The floating-point operations of a microbatch: the unit of measured speeds and of the cost model."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.spec.run import RunSpec
from protocol.spec.sections import ModelSpec


def microbatch_flops(spec: RunSpec, stages: Iterable[int]) -> float:
    """Floating-point operations of one microbatch's forward and backward pass through `stages`.

    A weight of a matrix takes two operations per token forward and four backward; attention is counted over
    the whole context, 12 L times the width of all queries per token and layer. The lookup of the embedding,
    the norms and the projections of links are left out. With Muon, a microbatch has its share of what its
    replica's optimizer computes in a step.
    """
    hosted = set(stages)
    layers = sum(len(spec.layers_of(stage)) for stage in hosted)
    head = spec.model.vocabulary * spec.model.width if spec.swarm.stages - 1 in hosted else 0
    flops = layer_flops(spec, layers) + 6.0 * head * tokens_of_microbatch(spec)
    if spec.inner.optimizer == "muon":
        flops += layers * turning_flops(spec.model) / spec.inner.microbatches
    return flops


def turning_flops(model: ModelSpec) -> float:
    """Of a step of Muon: five iterations of Newton-Schulz for the matrices of one layer."""
    d, q, k, f = model.width, model.query_width, model.key_width, model.feed_forward
    sides = [sorted(each) for each in 2 * [(q, d)] + 2 * [(k, d)] + 3 * [(f, d)]]
    return sum(5.0 * (4 * short**2 * long + 2 * short**3) for short, long in sides)


def layer_flops(spec: RunSpec, layers: int) -> float:
    """As :func:`microbatch_flops`, for `layers` layers without the head."""
    model = spec.model
    attention = 12.0 * model.context * model.query_width
    return (6.0 * model.layer_matrices + attention) * layers * tokens_of_microbatch(spec)


def tokens_of_microbatch(spec: RunSpec) -> int:
    return spec.inner.microbatch_size * spec.model.context
