"""Token tables at the receiving ends of links: they give back what a link lost about the present token.

No byte crosses the link for them: the receiving end knows the token ids. Unlike stage embeddings
(node.model.stage) they are no part of the model, so only replicas that have links train them.

Shapes: b microbatch, L tokens, d width, V vocabulary, m rows, r rank.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.experiment.link_ends import WrappedReceivingEnd
from node.model.stage import backward_from
from protocol.algorithm.subspace import ReceivingEnd, orthonormal_basis


class TokenTable(nn.Module):
    """A table R [V, d], which begins at zero. All replicas of a run begin with the same.

    Args:
        vocabulary, width: V and d.
        seed: of the random numbers below.
        rank: R = A B with A [m, r] = 0 and B [r, d] random at first; 0 for a full table.
        buckets: m; the ids share m rows, equally many ids each, by a fixed random assignment. 0 for V rows.
    """

    def __init__(self, vocabulary: int, width: int, seed: int, rank: int = 0, buckets: int = 0) -> None:
        super().__init__()
        generator = np.random.Generator(np.random.Philox(seed))
        rows_v = generator.permutation(vocabulary) % buckets if buckets else np.arange(vocabulary)
        self.register_buffer("rows_v", torch.from_numpy(rows_v), persistent=False)
        self.left = nn.Parameter(torch.zeros(buckets or vocabulary, rank or width))
        self.right: nn.Parameter | None = None
        if rank:
            # With this length, a step of AdamW on A changes a row of R as much as a step on a full table.
            b_rd = orthonormal_basis(width, seed)[:rank] * math.sqrt(width / rank)
            self.right = nn.Parameter(b_rd.contiguous())

    def forward(self, ids_bl: Tensor) -> Tensor:
        """R[ids], [b, L, d]."""
        left_bl = F.embedding(self.get_buffer("rows_v")[ids_bl], self.left)
        return left_bl if self.right is None else left_bl @ self.right


class TableEnd(WrappedReceivingEnd):
    """Adds R[ids] of `table` to the activation that `usual` gives. A backward pass trains the table."""

    def __init__(self, usual: ReceivingEnd, table: TokenTable) -> None:
        super().__init__(usual)
        self._table = table
        self._rows_bld: Tensor | None = None  # of a training pass, until its backward pass

    def expand_forward(self, x_blk: Tensor, ids_bl: Tensor) -> Tensor:
        rows_bld: Tensor = self._table(ids_bl)
        if rows_bld.requires_grad:  # not in a validation pass
            self._rows_bld = rows_bld
        return super().expand_forward(x_blk, ids_bl) + rows_bld.detach()

    def compress_backward(self, grad_bld: Tensor) -> Tensor:
        assert self._rows_bld is not None, "a backward pass without a forward pass"
        backward_from(self._rows_bld, grad_bld.to(self._rows_bld))
        self._rows_bld = None
        return super().compress_backward(grad_bld)
