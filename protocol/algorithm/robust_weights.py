"""Weights of a round that fall with the distance of a payload from the others: outer.weighting "robust".

With the clipped payloads q_m = s_m p_m (protocol.algorithm.clipping) as vectors over all parameters of the
stage, their weights w_m, and trusted weights u_m, which are w_m at first:

    d_m = |q_m - sum_{i != m} u_i q_i / sum_{i != m} u_i|        distance from the mean of the others
    c   = the smallest d within which half of the weight sum w_m is         weighted median
    u_m = w_m max(LEAST_FACTOR, min(1, c / d_m))

twice: the second mean hardly contains what the first has found to be far. This is Huber's estimator of a
location ("Robust Statistics", 1981, section 3.2), reweighted two times, with c as its threshold. The u_m are
the weights of the committed mean.

The mean of the others, and not of all: a payload of great weight would be near a mean that it makes itself.
The median is by weight, so that many payloads of little weight do not decide it.

The weights change the anchor, so they have the same bits on every machine: the sums as in
protocol.algorithm.outer_step, all else in float64, each operation rounded by itself, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protocol.algorithm.clipping import clipping_scales, payload_norm
from protocol.algorithm.topk import SparseTensor

LEAST_FACTOR = 0.125
"""A replica whose data differ from those of all others still counts. Clipping bounds the payload: a far one
of this weight moves the mean no further than a usual one."""

_ITERATIONS = 2
_LEAST_SQUARES = 2.0**-20
"""A squared distance below this part of the squared norms is rounding: the sums are float32."""
_MOST_RATIO = 2.0**20
"""Of all weights to those of the others, where one payload has nearly all: distances stay finite."""


def robust_weights(payloads: Sequence[Mapping[str, SparseTensor]], weights: Sequence[float]) -> list[float]:
    """The weight of each payload in the mean of its round, from LEAST_FACTOR times its weight to its weight.

    Equal to `weights` for one payload; for two, since each is as far from the other; and where finite
    payloads overflow in the sum, which :func:`outer_step.apply_update` then refuses.

    Costs two passes over all payloads, and memory of the size of the largest tensor.

    Args:
        payloads: of a manifest, decoded, in canonical order: all tensors of the stage.
        weights: positive and finite.
    """
    trusted = list(weights)
    if len(payloads) <= 2:
        return trusted
    norms = [payload_norm(payload) for payload in payloads]
    scales = clipping_scales(norms)
    for _ in range(_ITERATIONS):
        distances = _distances(payloads, norms, scales, trusted)
        if not all(map(math.isfinite, distances)):
            return list(weights)
        usual = weighted_median(distances, weights)
        trusted = [weight * _factor(each, usual) for weight, each in zip(weights, distances, strict=True)]
    return trusted


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest of `values` such that those up to it have at least half of the weight."""
    half, reached = math.fsum(weights) / 2, list[float]()
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached.append(weight)
        if math.fsum(reached) >= half:
            return value
    raise ValueError("a median needs values")


def _factor(distance: float, usual: float) -> float:
    return 1.0 if distance <= usual else max(LEAST_FACTOR, usual / distance)


def _distances(
    payloads: Sequence[Mapping[str, SparseTensor]],
    norms: Sequence[float],
    scales: Sequence[float],
    trusted: Sequence[float],
) -> list[float]:
    """d_m of each payload; one that is not finite where the sum overflows.

    With M = sum u_i q_i / sum u_i:  d_m = |q_m - M| sum_i u_i / sum_{i != m} u_i.
    """
    total = math.fsum(trusted)
    factors = [weight * scale for weight, scale in zip(trusted, scales, strict=True)]
    with_mean = [
        product * scale / total for product, scale in zip(_products(payloads, factors), scales, strict=True)
    ]
    if not all(map(math.isfinite, with_mean)):
        return [math.nan]
    mean_squares = math.fsum(weight * each for weight, each in zip(trusted, with_mean, strict=True)) / total
    found = []
    for position, (norm, scale) in enumerate(zip(norms, scales, strict=True)):
        own_squares = (norm * scale) * (norm * scale)
        squares = own_squares - 2 * with_mean[position] + mean_squares
        if squares <= _LEAST_SQUARES * (own_squares + mean_squares):
            found.append(0.0)
            continue
        others = math.fsum([*trusted[:position], *trusted[position + 1 :]])
        found.append(math.sqrt(squares) * min(total / others, _MOST_RATIO))
    return found


def _products(payloads: Sequence[Mapping[str, SparseTensor]], factors: Sequence[float]) -> list[float]:
    """<p_m, sum_i factor_i p_i> of each payload, tensor by tensor; not finite where the sum overflows."""
    found: list[list[float]] = [[] for _ in payloads]
    largest = max(map(_reach, (tensor for payload in payloads for tensor in payload.values())), default=0)
    zeros = torch.zeros(largest)
    for name in payloads[0]:
        tensors = [payload[name] for payload in payloads]
        total = zeros[: max(map(_reach, tensors))]
        for tensor, factor in zip(tensors, factors, strict=True):
            tensor.add_to(total, factor)
        for products, tensor in zip(found, tensors, strict=True):
            products.append(tensor.product(total))
        for tensor in tensors:
            _clear(total, tensor)
    return [math.fsum(each) if all(map(math.isfinite, each)) else math.nan for each in found]


def _reach(tensor: SparseTensor) -> int:
    """How many elements of the flattened tensor it may touch."""
    if tensor.indices_s is None:
        return len(tensor.codes_s)
    return int(tensor.indices_s.max()) + 1 if len(tensor.indices_s) else 0


def _clear(flat: Tensor, tensor: SparseTensor) -> None:
    """Set what `tensor` touches to 0: of a sparse one, far fewer than all elements."""
    if tensor.indices_s is None:
        flat.zero_()
    else:
        flat.index_fill_(0, tensor.indices_s, 0.0)
