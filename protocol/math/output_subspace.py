"""The projection of what layers add to the residual stream onto the subspace that all links carry.

What links drop of it, a pipeline never learns to use. Muon fills these directions all the same, and a model
without links adds them up. So in a run with pipelines and Muon, W = U U^T W for each such matrix W.

Anchors are compared by their bits, and machines add up the terms of a matrix product in orders of their own.
Of operands with about 21 bits each, a float64 holds all such sums exactly, so every order gives the same.

Shapes: d width, k subspace width, U [d, k].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from protocol.spec.run import RunSpec

OUTPUTS = (".wo", ".w_down")
"""Ends of the names of matrices that write into the residual stream, [d, in]."""
_ITERATIONS = 30
"""Each makes a singular value 1.4 times as large until it is nearly 1: enough for one of 1e-4."""


def output_basis(spec: RunSpec, stage: int) -> Tensor | None:
    """An orthonormal U [d, k], float64, in whose span the layers of `stage` write; None: anywhere."""
    k = spec.outputs_k(stage)
    return None if k is None else _span(spec.model.width, k, spec.seed)


def exactly_projected(tensors: Mapping[str, Tensor], basis_dk: Tensor | None) -> dict[str, Tensor]:
    """`tensors`, float32 on the CPU, with U U^T W for each W that writes into the residual stream.

    The bits are the same on every machine. Without a basis nothing changes.
    """
    found = dict(tensors)
    for name, weight in tensors.items():
        if basis_dk is not None and name.endswith(OUTPUTS):
            found[name] = _product(basis_dk, _product(basis_dk.T, weight.double())).float()
    return found


@lru_cache(maxsize=1)
def _span(width: int, k: int, seed: int) -> Tensor:
    """Orthonormal columns, to about 1e-6, with the span of the first k columns of the basis of links.

    QR has other last bits on other machines; Newton-Schulz with exact products has not.
    """
    gaussian = np.random.Generator(np.random.Philox(seed)).standard_normal((width, width))[:, :k]
    # By about the largest singular value, so that the iteration converges.
    found_dk = torch.from_numpy(gaussian) / (math.sqrt(width) + math.sqrt(k))
    for _ in range(_ITERATIONS):
        gram = _product(found_dk.T, found_dk)
        found_dk = _product(found_dk, (3.0 * torch.eye(k, dtype=torch.float64) - gram) / 2.0)
    return found_dk


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left` @ `right` of the rounded operands, exactly: in units of both steps all sums are below 2^53."""
    bits = (53 - left.shape[1].bit_length()) // 2
    return _rounded(left, bits) @ _rounded(right, bits)


def _rounded(matrix: Tensor, bits: int) -> Tensor:
    """Multiples of 2^-`bits` times the power of two above the largest magnitude."""
    step = math.ldexp(1.0, math.frexp(float(matrix.abs().amax()))[1] - bits)
    return (matrix / step).round() * step
