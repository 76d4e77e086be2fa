"""The token table of a link: it gives back what the link lost about the present token.

No byte crosses the link for it, since the receiving end knows the token ids. It is no part of the model: only
the member behind the link trains it, and it is never exchanged or exported. So a pipeline need not bend the
model that all replicas share to what its own links lose (measured: docs/experiments.md).

Shapes: b microbatch, L tokens, d width, V vocabulary, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.model.shapes import link_table_shapes
from protocol.algorithm.subspace import orthonormal_basis
from protocol.spec.run import RunSpec

LINK_TABLE = -1
"""Its key in mappings whose other keys are stages."""


class LinkTable(nn.Module):
    """R [V, d], which is 0 at first. With `link.table_rank` r, R = A B with A [V, r] = 0 and B [r, d].

    Attributes:
        values: R; or A and B.
    """

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self._spec = spec
        self.values = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape)) for name, shape in link_table_shapes(spec).items()}
        )
        self.reset()

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy the values of another table of the run."""
        for name, live in self.values.items():
            live.copy_(values[name])

    @torch.no_grad()
    def reset(self) -> None:
        """R := 0."""
        self.values["left"].zero_()
        if "right" in self.values:
            width, rank = self._spec.model.width, self._spec.link.table_rank
            # Of this length, a step of AdamW on A changes a row of R as much as a step on a full table.
            b_rd = orthonormal_basis(width, self._spec.seed)[:rank] * math.sqrt(width / rank)
            self.values["right"].copy_(b_rd)

    @property
    def is_finite(self) -> bool:
        return all(bool(value.isfinite().all()) for value in self.values.values())

    def forward(self, ids_bl: Tensor) -> Tensor:
        """R[ids], [b, L, d]."""
        left_bl = F.embedding(ids_bl, self.values["left"])
        return left_bl @ self.values["right"] if "right" in self.values else left_bl
