"""The token table of a link: it gives back what the link lost about the present token.

No byte crosses the link for it, since the receiving end knows the token ids. It is no part of the model: only
the member behind the link trains it, and it is never exchanged or exported. So a pipeline need not bend the
model that all replicas share to what its own links lose (measured: docs/findings.md).

Shapes: b microbatch, L tokens, d width, V vocabulary, m rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.core.model.shapes import link_table_shapes
from protocol.spec.run import RunSpec

LINK_TABLE = -1
"""Its key in mappings whose other keys are stages."""
_ROWS = "rows"


class LinkTable(nn.Module):
    """R [m, d] of the link into stage `boundary`, which is 0 at first.

    With `link.table_rows` m, the tokens share m rows by a fixed random assignment, each row equally many.
    """

    def __init__(self, spec: RunSpec, boundary: int) -> None:
        super().__init__()
        self._rows_md = nn.Parameter(torch.zeros(link_table_shapes(spec)[_ROWS]))
        self.register_buffer("_row_of_v", _assignment(spec, boundary), persistent=False)

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """The live values by name."""
        return {_ROWS: self._rows_md}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy the values of a table of the same link."""
        self._rows_md.copy_(values[_ROWS].detach())

    @torch.no_grad()
    def reset(self) -> None:
        """R := 0."""
        self._rows_md.zero_()

    @property
    def is_finite(self) -> bool:
        return bool(self._rows_md.isfinite().all())

    def forward(self, ids_bl: Tensor) -> Tensor:
        """R[ids], [b, L, d]."""
        return F.embedding(self.get_buffer("_row_of_v")[ids_bl], self._rows_md)


def _assignment(spec: RunSpec, boundary: int) -> Tensor:
    """The row [V] of each token."""
    vocabulary, rows = spec.model.vocabulary, spec.link.table_rows
    if not rows:
        return torch.arange(vocabulary)
    # Each link has another assignment: two tokens that share a row at one do so at no other. From SHAKE-128,
    # as numpy and torch promise no stream of permutations, and a checkpoint is read by a later version.
    raw = hashlib.shake_128(f"hetnode table {spec.seed} {boundary}".encode()).digest(8 * vocabulary)
    order = np.argsort(np.frombuffer(raw, "<u8"), kind="stable")
    row_of_v = np.empty(vocabulary, np.int64)
    row_of_v[order] = np.arange(vocabulary) % rows
    return torch.from_numpy(row_of_v)
