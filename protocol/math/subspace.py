"""The link between two members of a pipeline replica, projected onto a fixed k-dimensional subspace.

Subspace Networks, as used by "Heterogeneous Low-Bandwidth Pre-Training of LLMs" (arXiv 2601.02360): only
the coordinates of an activation in an orthonormal U [d, k], which both ends share, cross the link. The
receiving end adds T_perp = TE (I - U U^T), a constant of the inner phase, which it derives from TE of the
last committed round.

Shapes: b micro-batch, L tokens, d width, k subspace width, V vocabulary.
"""

from __future__ import annotations

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


class SendingEnd:
    """The end of a link that sends activations and receives gradients.

    The paper sends (X - T_perp[ids]) U. T_perp U = TE (I - U U^T) U = 0, so this end subtracts nothing and
    keeps no table: at the 1b preset that saves 262 MB on the device.

    Results have the dtype and the device of the basis; where k is 0, every tensor passes unchanged.

    Args:
        k: width of the link; 0 sends all of d.
        basis_dd: the run's basis. U is its first k columns.
    """

    def __init__(self, k: int, basis_dd: Tensor) -> None:
        self.k = k
        # A copy of k columns: a view would keep all of them on the device.
        self.basis_dk = basis_dd[:, :k].contiguous()

    def compress_forward(self, x_bld: Tensor) -> Tensor:
        """X~ = X U, to be sent."""
        return x_bld.to(self.basis_dk) @ self.basis_dk if self.k else x_bld

    def expand_backward(self, grad_blk: Tensor) -> Tensor:
        """G~ U^T, as received: the exact gradient of :meth:`compress_forward`."""
        return grad_blk.to(self.basis_dk) @ self.basis_dk.T if self.k else grad_blk


class ReceivingEnd:
    """The end of a link that receives activations and sends gradients. Only this end needs the embedding.

    Args:
        k, basis_dd: the same as at the sending end.
        table_vd: TE of the last committed round; any dtype and device.
    """

    def __init__(self, k: int, basis_dd: Tensor, table_vd: Tensor) -> None:
        self.k = k
        self.basis_dk = basis_dd[:, :k].contiguous()
        self.refresh(table_vd)

    def refresh(self, table_vd: Tensor) -> None:
        """Derive T_perp from TE of a newly committed round; the same as the paper's eqs 3 and 4."""
        if self.k:
            self.perpendicular_vd = perpendicular_table(table_vd.detach().to(self.basis_dk), self.basis_dk)

    def expand_forward(self, x_blk: Tensor, ids_bl: Tensor) -> Tensor:
        """X^ = X~ U^T + T_perp[ids], as received; `ids_bl` are the tokens of the activation."""
        if not self.k:
            return x_blk
        return x_blk.to(self.basis_dk) @ self.basis_dk.T + self.perpendicular_vd[ids_bl]

    def compress_backward(self, grad_bld: Tensor) -> Tensor:
        """G~ = G U, to be sent: the exact gradient of :meth:`expand_forward`, as T_perp is constant."""
        return grad_bld.to(self.basis_dk) @ self.basis_dk if self.k else grad_bld
