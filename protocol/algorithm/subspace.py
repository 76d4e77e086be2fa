"""The link between two members of a pipeline replica, projected onto a fixed k-dimensional subspace.

Subspace Networks, as used by "Heterogeneous Low-Bandwidth Pre-Training of LLMs" (arXiv 2601.02360): only
what lies outside the token embedding crosses the link, in the coordinates of an orthonormal U [d, k] that
both ends share. T_perp = TE (I - U U^T) is a constant of the inner phase, derived by each end from TE of
the last committed round.

Shapes: b micro-batch, L tokens, d width, k subspace width, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor


def orthonormal_basis(width: int, seed: int) -> Tensor:
    """The run's orthonormal basis [d, d], float32: QR of a Gaussian matrix, with a positive diagonal of R.

    U_k is its first k columns. So links of different k share one basis, and k of a link may change at a
    round boundary.
    """
    gaussian_dd = np.random.Generator(np.random.Philox(seed)).standard_normal((width, width))
    q_dd, r_dd = np.linalg.qr(gaussian_dd)
    # QR is unique up to the signs of the columns, which LAPACK builds choose differently.
    return torch.from_numpy((q_dd * np.sign(np.diag(r_dd))).astype(np.float32))


def perpendicular_table(table_vd: Tensor, basis_dk: Tensor) -> Tensor:
    """T_perp = TE - TE U U^T, [V, d]: the part of the token embedding that a link cannot carry."""
    return table_vd - (table_vd @ basis_dk) @ basis_dk.T


class LinkTransform(Protocol):
    """What both ends of one link do to activations and gradients. `k` is 0 where all of d crosses."""

    k: int

    def refresh(self, table_vd: Tensor) -> None: ...
    def compress_forward(self, x_bld: Tensor, ids_bl: Tensor) -> Tensor: ...
    def expand_forward(self, x_blk: Tensor, ids_bl: Tensor) -> Tensor: ...
    def compress_backward(self, grad_bld: Tensor) -> Tensor: ...
    def expand_backward(self, grad_blk: Tensor) -> Tensor: ...


def link_projection(k: int, basis_dd: Tensor, table_vd: Tensor) -> LinkTransform:
    """The transform of a link of width k over the run's basis; k = 0 sends activations as they are."""
    return LinkProjection(basis_dd[:, :k], table_vd) if k else Uncompressed()


class LinkProjection:
    """A link of width k > 0. Results have the dtype and the device of the basis.

    The backward pair is the exact gradient of the forward pair, T_perp being constant; nothing here needs
    autograd.

    Args:
        basis_dk: U, orthonormal columns.
        table_vd: TE of the last committed round; any dtype and device.
    """

    def __init__(self, basis_dk: Tensor, table_vd: Tensor) -> None:
        self.k = basis_dk.shape[1]
        self.basis_dk = basis_dk.contiguous()
        self.refresh(table_vd)

    def refresh(self, table_vd: Tensor) -> None:
        """Take over TE of a newly committed round.

        TE stays the one authoritative table; deriving T_perp from it at every commit equals the paper's
        adaptation of T_S and T_perp (eqs 3 and 4).
        """
        self.perpendicular_vd = perpendicular_table(table_vd.detach().to(self.basis_dk), self.basis_dk)

    def compress_forward(self, x_bld: Tensor, ids_bl: Tensor) -> Tensor:
        """X~ = (X - T_perp[ids]) U, to be sent."""
        return (x_bld - self.perpendicular_vd[ids_bl]) @ self.basis_dk

    def expand_forward(self, x_blk: Tensor, ids_bl: Tensor) -> Tensor:
        """X^ = X~ U^T + T_perp[ids], as received."""
        return x_blk.to(self.basis_dk) @ self.basis_dk.T + self.perpendicular_vd[ids_bl]

    def compress_backward(self, grad_bld: Tensor) -> Tensor:
        """G~ = G U, to be sent."""
        return grad_bld.to(self.basis_dk) @ self.basis_dk

    def expand_backward(self, grad_blk: Tensor) -> Tensor:
        """G~ U^T, as received."""
        return grad_blk.to(self.basis_dk) @ self.basis_dk.T


class Uncompressed:
    """A link that carries all of d: every operation hands its tensor through."""

    k = 0

    def refresh(self, table_vd: Tensor) -> None:
        pass

    def compress_forward(self, x_bld: Tensor, ids_bl: Tensor) -> Tensor:
        return x_bld

    def expand_forward(self, x_blk: Tensor, ids_bl: Tensor) -> Tensor:
        return x_blk

    def compress_backward(self, grad_bld: Tensor) -> Tensor:
        return grad_bld

    def expand_backward(self, grad_blk: Tensor) -> Tensor:
        return grad_blk
