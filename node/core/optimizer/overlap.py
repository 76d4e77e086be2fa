"""Training that goes on while a proposal waits for its decision (eager updates, arXiv 2502.12996).

Until the decision, the training starts from an estimate of the next anchor: what a round of this replica's
payload alone would commit. The parameters of the proposal are kept, and the outer step treats them as the
local parameters. After the decision the training since the proposal is added to what they have become.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from node.core.model.transfer import copy_into
from node.core.optimizer.outer_stage import as_float32, copied

Values = Iterable[tuple[str, Tensor]]


class Overlap:
    """The training of one stage beyond a pending proposal.

    Attributes:
        covered: the parameters at the proposal, float32 on the CPU, by canonical name.
    """

    def __init__(self, covered: Mapping[str, Tensor]) -> None:
        self.covered = copied(covered)

    @classmethod
    @torch.no_grad()
    def begin(cls, local: Mapping[str, Tensor], estimate: Values) -> Overlap:
        """Keep the parameters `local` of a proposal; `local` then becomes the `estimate`."""
        overlap = cls(local)
        for name, start in estimate:
            copy_into(local[name], start)
        return overlap

    @torch.no_grad()
    def end(self, local: Mapping[str, Tensor], estimate: Values) -> None:
        """local := covered + (local - estimate): what the outer step left, plus the training since."""
        for name, start in estimate:
            local[name].copy_(self.covered[name] + (as_float32(local[name]) - start))
