"""The weights of protocol.algorithm.robust_weights: their definition in float64, bounds, and bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.algorithm.clipping import clipping_scales, payload_norm
from protocol.algorithm.robust_weights import LEAST_FACTOR, robust_weights, weighted_median
from protocol.algorithm.topk import SparseTensor, TensorLayout, sparsify
from protocol.spec.outer import OuterSpec

SHAPES = {"a": (40, 16), "b": (700,), "c": (3, 5)}
SPARSE: dict[str, Any] = {"chunk": 64, "top_k": 8}
CODECS: list[dict[str, Any]] = [
    SPARSE,
    SPARSE | {"layout": "tiles", "codebook": "chunk"},
    {"top_k": 0, "quantizer": "none"},
]
Payload = dict[str, SparseTensor]
KNOWN = ["0x1.0000000000000p+0", "0x1.f42f025f672dap-3", "0x1.0000000000000p-1", "0x1.1efa8876b2f93p-1"]


def payload(seed: int, codec: dict[str, Any] = SPARSE, shared: float = 1.0, scale: float = 1.0) -> Payload:
    """Noise, plus `shared` times what all payloads have in common."""
    common, own = (torch.Generator().manual_seed(each) for each in (99, seed))
    found = {}
    for name, shape in SHAPES.items():
        values = shared * torch.randn(shape, generator=common) + torch.randn(shape, generator=own)
        found[name] = sparsify(scale * values, TensorLayout(shape, OuterSpec(**codec)))
    return found


def flat(content: Payload) -> Tensor:
    parts = []
    for name, shape in SHAPES.items():
        dense = torch.zeros(torch.Size(shape).numel(), dtype=torch.float64)
        content[name].add_to(dense, 1.0)
        parts.append(dense)
    return torch.cat(parts)


def dense(*values: float) -> Payload:
    return {"a": SparseTensor(None, torch.tensor(values))}


def expected(payloads: list[Payload], weights: list[float]) -> list[float]:
    """The definition, on dense vectors of all parameters."""
    scales = clipping_scales([payload_norm(each) for each in payloads])
    vectors = [scale * flat(each) for scale, each in zip(scales, payloads, strict=True)]
    trusted, order = list(weights), range(len(payloads))
    for _ in range(2):
        distances = []
        for position in order:
            others = [each for each in order if each != position]
            mean = sum(trusted[each] * vectors[each] for each in others) / sum(
                trusted[each] for each in others
            )
            distances.append(float((vectors[position] - mean).norm()))
        usual = weighted_median(distances, weights)
        trusted = [
            weight * max(LEAST_FACTOR, min(1.0, usual / each))
            for weight, each in zip(weights, distances, strict=True)
        ]
    return trusted


payload_sets = st.lists(
    st.builds(
        payload,
        st.integers(0, 50),
        st.sampled_from(CODECS[:1]),
        st.sampled_from([0.0, 1.0, 3.0]),
        st.sampled_from([0.0, 0.5, 1.0, 30.0]),
    ),
    min_size=1,
    max_size=6,
)


def weights_of(payloads: list[Payload]) -> list[float]:
    return [(1.0, 0.3, 2.5, 1.0, 0.75, 1.0)[position] for position in range(len(payloads))]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_weights_are_those_of_their_definition(codec: dict[str, Any]) -> None:
    payloads = [payload(seed, codec, scale=20.0 if seed == 2 else 1.0 + seed / 8) for seed in range(5)]
    weights = weights_of(payloads)
    found = robust_weights(payloads, weights)
    assert found == pytest.approx(expected(payloads, weights), rel=1e-6)
    assert found != weights


@given(payload_sets)
def test_a_factor_is_between_its_bounds_and_half_of_the_weight_keeps_its_own(payloads: list[Payload]) -> None:
    weights = weights_of(payloads)
    found = robust_weights(payloads, weights)
    for weight, trusted in zip(weights, found, strict=True):
        assert LEAST_FACTOR * weight <= trusted <= weight
    kept = [weight for weight, trusted in zip(weights, found, strict=True) if weight == trusted]
    assert 2 * math.fsum(kept) >= math.fsum(weights)


@given(st.lists(st.integers(0, 50), max_size=2), st.sampled_from([1e-3, 1.0, 50.0]))
def test_of_one_or_two_payloads_the_weights_stay_as_they_are(seeds: list[int], scale: float) -> None:
    payloads = [payload(seed, scale=scale if position else 1.0) for position, seed in enumerate(seeds)]
    weights = [0.3, 1.7][: len(seeds)]
    assert robust_weights(payloads, weights) == weights


@given(payload_sets, st.randoms())
def test_another_order_gives_the_same_weights_but_for_rounding(payloads: list[Payload], order: Any) -> None:
    weights = weights_of(payloads)
    positions = list(range(len(payloads)))
    order.shuffle(positions)
    found = robust_weights([payloads[each] for each in positions], [weights[each] for each in positions])
    usual = robust_weights(payloads, weights)
    assert found == pytest.approx([usual[each] for each in positions], rel=1e-3)


@given(payload_sets, st.integers(-20, 20))
def test_the_unit_of_the_payloads_does_not_matter(payloads: list[Payload], exponent: int) -> None:
    """Powers of two, since they round nothing."""
    weights = weights_of(payloads)
    usual, scaled = (
        [
            {name: SparseTensor(each.indices_s, each.values_s * unit) for name, each in content.items()}
            for content in payloads
        ]
        for unit in (1.0, 2.0**exponent)
    )
    assert robust_weights(scaled, weights) == robust_weights(usual, weights)


@pytest.mark.parametrize("count", [3, 4, 9])
def test_one_far_payload_among_many_gets_less_and_the_others_keep_theirs(count: int) -> None:
    honest = [payload(seed, shared=3.0) for seed in range(count - 1)]
    *near, far = robust_weights([*honest, payload(77, shared=-3.0, scale=4.0)], [1.0] * count)
    assert far < 0.5
    assert min(near) > 0.85


def test_the_farthest_payload_is_not_silenced() -> None:
    honest = [dense(1.0, 0.01 * number, 0.0) for number in range(4)]
    *near, far = robust_weights([*honest, dense(-7.9, 0.0, 0.0)], [1.0] * 5)
    assert far == LEAST_FACTOR
    assert near[1:3] == [1.0, 1.0]


def test_a_payload_of_half_of_the_weight_is_not_near_by_itself() -> None:
    """The mean of all would lie between it and the others."""
    heavy, *others = robust_weights([dense(3.0), dense(1.0), dense(1.0)], [2.0, 1.0, 1.0])
    assert heavy < 1.4
    assert others == [1.0, 1.0]


def test_payloads_that_differ_by_rounding_keep_their_weights() -> None:
    same = [payload(0, {"top_k": 0, "quantizer": "none"})] * 3
    near = {name: SparseTensor(None, each.codes_s * (1 + 2.0**-22)) for name, each in same[0].items()}
    assert robust_weights([*same, near], [1.0, 0.3, 1.7, 1.0]) == [1.0, 0.3, 1.7, 1.0]


def test_where_the_sum_overflows_the_weights_stay() -> None:
    top = torch.finfo(torch.float32).max
    assert robust_weights([dense(top, -top)] * 3, [1.0] * 3) == [1.0] * 3
    assert robust_weights([dense(top), dense(-top), dense(top), dense(top)], [1.0] * 4) == [1.0] * 4


def test_extreme_weights_give_finite_weights() -> None:
    found = robust_weights([payload(seed) for seed in range(3)], [1e6, 1e-300, 1e-300])
    assert all(map(math.isfinite, found))


def test_the_weights_have_these_bits() -> None:
    """Values from one machine, for all others: they decide what a round commits."""
    numbers = torch.arange(600)
    payloads = [
        {
            "a": SparseTensor(
                numbers * (2 + seed), (numbers * seed % 4).byte(), torch.tensor([0.1, 0.3]) * (1 + seed / 3)
            )
        }
        for seed in range(4)
    ]
    assert [each.hex() for each in robust_weights(payloads, [1.0, 0.3, 0.5, 1.0])] == KNOWN


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 9)), min_size=1))
def test_at_least_half_of_the_weight_lies_on_each_side_of_the_median(
    pairs: list[tuple[float, float]],
) -> None:
    values, weights = zip(*pairs, strict=True)
    median, half = weighted_median(values, weights), math.fsum(weights) / 2
    assert math.fsum(weight for value, weight in pairs if value <= median) >= half
    assert math.fsum(weight for value, weight in pairs if value < median) < half
