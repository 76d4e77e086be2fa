"""The figures of a payload equal their definitions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from node.agreement.meter import AgreementMeter
from node.ipc.worker_calls import Comparison, MeasuredAgreement
from protocol.math.outer_step import apply_update
from protocol.math.topk import SparseTensor
from protocol.spec.outer import OuterSpec
from tests.support.payload_vectors import CODECS, SHAPES, SPARSE, cosine, flat, payload

CLIP = 8.0


def measured(
    payloads: list[dict[str, SparseTensor]], weights: list[float], comparison: Comparison
) -> MeasuredAgreement | None:
    meter = AgreementMeter(comparison, payloads, weights, CLIP)
    anchor = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    measured = apply_update(anchor, payloads, weights, OuterSpec(learning_rate=0.7, clip=CLIP), meter.add)
    plain = apply_update(anchor, payloads, weights, OuterSpec(learning_rate=0.7, clip=CLIP))
    assert all(torch.equal(measured[name], plain[name]) for name in SHAPES), "measuring changes no bit"
    return meter.results()[0]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("position", range(4))
def test_the_figures_are_those_of_their_definitions(codec: dict[str, Any], position: int) -> None:
    outer = OuterSpec(**codec)
    payloads, weights = [payload(outer, seed) for seed in range(4)], [1.0, 0.3, 2.5, 1.0]
    alike, unlike = (position + 1) % 4, (position + 3) % 4
    found = measured(payloads, weights, Comparison((position,), alike, unlike))
    vectors = [flat(each) for each in payloads]
    total = sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))
    others = total - weights[position] * vectors[position]
    assert found is not None
    assert found.cosine == pytest.approx(cosine(vectors[position], others), abs=1e-6)
    assert found.norm == pytest.approx(float(vectors[position].norm()), rel=1e-9)
    assert found.mean_norm == pytest.approx(float(total.norm()) / sum(weights), rel=1e-6)
    assert found.alike == pytest.approx(cosine(vectors[position], vectors[alike]), abs=1e-6)
    assert found.unlike == pytest.approx(cosine(vectors[position], vectors[unlike]), abs=1e-6)


def test_the_others_are_clipped_as_in_the_committed_mean() -> None:
    outer = OuterSpec(**SPARSE)
    payloads = [payload(outer, seed, scale=50.0 if seed == 2 else 1.0) for seed in range(3)]
    found = measured(payloads, [1.0] * 3, Comparison((0,)))
    vectors = [flat(each) for each in payloads]
    bound = 8 * float(sorted(vector.norm() for vector in vectors)[1])
    clipped = vectors[2] * bound / vectors[2].norm()
    assert found is not None
    assert found.cosine == pytest.approx(cosine(vectors[0], vectors[1] + clipped), abs=1e-6)


def test_noise_agrees_with_nothing_and_a_copy_with_everything() -> None:
    outer = OuterSpec(**SPARSE)
    honest, noise = [payload(outer, seed, shared=3.0) for seed in range(3)], payload(outer, 7, shared=0.0)
    of_noise = measured([*honest, noise], [1.0] * 4, Comparison((3,)))
    of_copy = measured([honest[0], honest[0]], [1.0] * 2, Comparison((1,), alike=0))
    assert of_noise is not None
    assert of_noise.cosine == pytest.approx(0.0, abs=0.08)
    assert of_copy == MeasuredAgreement(
        pytest.approx(1.0), of_copy.norm, of_copy.mean_norm, pytest.approx(1.0)
    )


def test_a_single_payload_is_compared_with_itself() -> None:
    found = measured([payload(OuterSpec(**SPARSE), 0)], [0.5], Comparison((0,)))
    assert found is not None
    assert (found.cosine, found.alike, found.unlike) == (1.0, None, None)
    assert found.norm == pytest.approx(found.mean_norm)


def test_what_rounding_decides_is_not_told() -> None:
    """The other payload adds nothing that float32 keeps, so its direction is not known."""
    outer = OuterSpec(top_k=0)
    strong, nothing = payload(outer, 0), payload(outer, 1, shared=0.0, scale=0.0)
    assert measured([strong, nothing], [1.0, 1.0], Comparison((0,))).cosine is None
    assert measured([strong, nothing], [1.0, 1.0], Comparison((1,), alike=0)) == MeasuredAgreement(
        None, 0.0, pytest.approx(float(flat(strong).norm()) / 2, rel=1e-6)
    )
    weak = payload(outer, 1, scale=1e-6)
    assert measured([strong, weak], [1.0, 1e-3], Comparison((0,))).cosine is None


def test_figures_that_overflow_are_dropped() -> None:
    outer = OuterSpec(top_k=0)
    meter = AgreementMeter(Comparison((0,)), [payload(outer, 0)] * 2, [1.0, 1.0], CLIP)
    meter.add("a", torch.full((640,), 3e38))
    meter.add("b", torch.full((700,), float("inf")))
    assert meter.results() == [None]
