"""The exchangeable parts of a trainer. Experiments and imported models replace some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor

from node.core.model.init import InitialParameters, initial_parameters
from node.core.optimizer.inner import OPTIMIZERS, MakeOptimizer
from protocol.math.subspace import ReceivingEnd, orthonormal_basis
from protocol.spec.run import RunSpec


def run_basis(spec: RunSpec, boundary: int) -> Tensor:
    """The orthonormal basis [d, d] of the link into stage `boundary`. All links of a run share it."""
    return _cached_basis(spec.model.width, spec.seed)


# Links are recreated at round boundaries, and a QR decomposition of 8192 x 8192 takes seconds.
_cached_basis = lru_cache(maxsize=1)(orthonormal_basis)


@dataclass(frozen=True)
class TrainerFactories:
    """Functions that create the parts.

    Attributes:
        initial: replaced if the run starts from given parameters (node.checkpoint.initial). Only experiments
            replace the others, but `optimizers`, which say where the moments are.
        receiving_end: from k (0: uncompressed), basis [d, d], and TE [V, d] of the last commit.
        basis: as :func:`run_basis`.
    """

    initial: InitialParameters = initial_parameters
    receiving_end: Callable[[int, Tensor, Tensor], ReceivingEnd] = ReceivingEnd
    basis: Callable[[RunSpec, int], Tensor] = run_basis
    optimizers: Mapping[str, MakeOptimizer] = field(default_factory=lambda: OPTIMIZERS)
