"""Other bases U of links than the run's random one.

Shapes: d width, k subspace width. U [d, k] is the first k columns of an orthonormal basis [d, d].
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from protocol.algorithm.subspace import orthonormal_basis


def principal(covariance_dd: Tensor) -> Tensor:
    """Eigenvectors [d, d], float32, of the largest eigenvalue first."""
    vectors_dd: Tensor = torch.linalg.eigh(covariance_dd.double()).eigenvectors
    return vectors_dd.flip(-1).float().contiguous()


def grassmann_step(basis_dd: Tensor, k: int, gradients_dd: Tensor, rate: float) -> Tensor:
    """The basis [d, d] after one step that reduces the gradient loss of the links, |G - G U U^T|^2.

    The step follows the gradient on the Grassmann manifold, (I - U U^T) A U with A = sum G^T G, divided by
    the largest eigenvalue of A. QR makes the columns orthonormal again.
    """
    basis_dd, a_dd = basis_dd.double(), gradients_dd.double()
    u_dk = basis_dd[:, :k]
    largest = torch.linalg.eigvalsh(a_dd)[-1].clamp_min(torch.finfo(torch.float64).tiny)
    pulled_dk = a_dd @ u_dk / largest
    moved_dk = u_dk + rate * (pulled_dk - u_dk @ (u_dk.T @ pulled_dk))
    q_dd: Tensor
    q_dd, r_dd = torch.linalg.qr(torch.cat((moved_dk, basis_dd[:, k:]), dim=1))
    # QR is unique only up to signs; a positive diagonal of R fixes them.
    signs_d: Tensor = r_dd.diagonal().sign()
    return (q_dd * signs_d).float()


def rotated(basis_dd: Tensor, k: int, seed: int) -> Tensor:
    """The basis [d, d] with U Q in place of U, by a fixed rotation Q [k, k].

    A link with it sends X U Q and reconstructs X~ Q^T U^T: it rotates the k numbers before they are rounded
    to few bits, and back after. It spreads what U has concentrated in few of them, as :func:`principal` does;
    the run's own U is a random rotation already.
    """
    return torch.cat((basis_dd[:, :k] @ rotation(k, seed).to(basis_dd), basis_dd[:, k:]), dim=1)


def rotation(k: int, seed: int) -> Tensor:
    """An orthonormal matrix [k, k], float32: a Hadamard matrix with random signs where k is a power of two.

    Else a random one (protocol.algorithm.subspace.orthonormal_basis).
    """
    if k & (k - 1):
        return orthonormal_basis(k, seed)
    hadamard_kk = np.ones((1, 1))
    while len(hadamard_kk) < k:
        hadamard_kk = np.block([[hadamard_kk, hadamard_kk], [hadamard_kk, -hadamard_kk]])
    signs_k = np.random.Generator(np.random.Philox(seed)).choice((-1.0, 1.0), k)
    return torch.from_numpy(signs_k[:, None] * hadamard_kk / math.sqrt(k)).float()
