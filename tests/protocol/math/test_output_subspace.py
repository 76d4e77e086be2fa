"""What layers add to the residual stream stays in what links carry, with the same bits on every machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.math.output_subspace import exactly_projected, output_basis
from protocol.math.subspace import orthonormal_basis
from protocol.spec.run import RunSpec
from tests.support.running_replica import spec_of

PIPELINES = {"inner.optimizer": "muon", "swarm.replicas": 0, "swarm.stages": 2, "link.k": 8}
"""A run of pipelines alone with Muon, of width 32."""


def projected(weight: Tensor, basis: Tensor) -> Tensor:
    found = exactly_projected({"0.wo": weight, "0.wq": weight}, basis)
    assert found["0.wq"] is weight
    return found["0.wo"]


def bound(**overrides: Any) -> RunSpec:
    return spec_of(**{**PIPELINES, **overrides})


@pytest.mark.parametrize(
    ("overrides", "stage", "k"),
    [
        ({}, 0, 8),
        ({}, 1, None),  # no link follows
        ({"inner.optimizer": "adamw"}, 0, None),
        ({"swarm.replicas": 1}, 0, 8),
        ({"swarm.replicas": 1, "swarm.pipelines": 0}, 0, None),
        ({"link.k": 0}, 0, None),
        ({"link.k": 32}, 0, None),
        ({"link.least_k": 4, "link.most_k": 16}, 0, 16),
        ({"link.least_k": 4, "link.most_k": 16, "link.uncompressed": True}, 0, None),
        ({"model.norms": "outputs"}, 0, None),
    ],
)
def test_only_stages_before_links_of_a_run_with_muon_are_bound(
    overrides: dict[str, Any], stage: int, k: int | None
) -> None:
    basis = output_basis(bound(**overrides), stage)
    assert (None if basis is None else basis.shape[1]) == k


@pytest.mark.parametrize(("width", "k"), [(32, 1), (32, 16), (32, 31), (128, 5), (128, 61)])
def test_the_basis_spans_what_links_carry(width: int, k: int) -> None:
    basis = output_basis(bound(**{"model.width": width, "link.k": k}), 0)
    assert basis is not None
    u_dk = orthonormal_basis(width, 0)[:, :k].double()
    torch.testing.assert_close(basis @ basis.T, u_dk @ u_dk.T, rtol=0, atol=1e-5)
    torch.testing.assert_close(basis.T @ basis, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-5)


@given(st.integers(0, 2**32), st.integers(-100, 100))
def test_projecting_again_changes_nothing_but_the_last_bits(seed: int, exponent: int) -> None:
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    basis = output_basis(bound(), 0)
    assert basis is not None
    once = projected(weight, basis)
    scale = float(weight.abs().amax())
    torch.testing.assert_close(projected(once, basis), once, rtol=0, atol=2e-6 * scale)
    u_dk = orthonormal_basis(32, 0)[:, :8]
    torch.testing.assert_close(once, u_dk @ (u_dk.T @ weight), rtol=0, atol=5e-6 * scale)


@given(st.integers(0, 2**32))
def test_the_order_in_which_a_machine_sums_changes_no_bit(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 48, generator=random)
    basis = output_basis(bound(), 0)
    assert basis is not None
    expected = projected(weight, basis)
    rows, columns = torch.randperm(32, generator=random), torch.randperm(8, generator=random)
    shuffled = projected(weight[rows], basis[rows][:, columns])
    assert torch.equal(shuffled, expected[rows])


def test_zeros_stay_zeros() -> None:
    basis = output_basis(bound(), 0)
    assert basis is not None
    assert not projected(torch.zeros(32, 4), basis).any()
