"""The values of a stage's parameters before round 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from node.core.model.shapes import parameter_shapes
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.output_subspace import OUTPUTS
from protocol.spec.run import RunSpec

InitialParameters = Callable[[RunSpec, int], dict[str, Tensor]]
"""The parameters of a stage before round 1, float32 on the CPU."""
_STD = 0.02
_BIASES = (".bq", ".bk", ".bv")


def initial_parameters(spec: RunSpec, stage: int) -> dict[str, Tensor]:
    """The parameters of `stage` before round 1: float32 on the CPU, equal in every bit on every machine.

    Matrices are uniform with standard deviation 0.02. Matrices that write into the residual stream have
    0.02 / sqrt(2 layers), so that its variance does not grow with the depth. Norms are 1, biases 0.

    Raises HetnodeError INITIAL_UNAVAILABLE if the run starts from given parameters (node.checkpoint.initial).
    """
    if spec.initial is not None:
        raise initial_unavailable(spec)
    parameters: dict[str, Tensor] = {}
    for index, (name, shape) in enumerate(parameter_shapes(spec, stage).items()):
        if len(shape) == 1:
            parameters[name] = torch.zeros(shape) if name.endswith(_BIASES) else torch.ones(shape)
            continue
        std = _STD / math.sqrt(2 * spec.model.layers) if name.endswith(OUTPUTS) else _STD
        # One stream per tensor: a member draws its own stages without those before them.
        stream = np.random.Philox(key=np.array([spec.seed, stage << 32 | index], dtype=np.uint64))
        parameters[name] = torch.from_numpy(_uniform(stream, math.prod(shape), std).reshape(shape))
    return parameters


def initial_unavailable(spec: RunSpec) -> HetnodeError:
    return HetnodeError(
        ErrorCode.INITIAL_UNAVAILABLE,
        f"Run {spec.name} starts from given parameters, but their folder is not set on this machine.",
        "Set --initial to the folder that 'hetnode import' has written for this run.",
    )


def _uniform(stream: np.random.Philox, count: int, std: float) -> np.ndarray:
    """`count` float32 values, uniform with mean 0 and standard deviation `std`."""
    # Replicas do not compare their initial parameters, so one different bit would let anchors diverge.
    # A normal distribution needs log and cos, whose last bit differs between C libraries. Here the odd
    # numerators below 2^24 are exact in float32. Only sqrt and one product round, and IEEE 754 defines both
    # to the last bit.
    raw_u32 = stream.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    numerator = (raw_u32 >> 8).astype(np.int32) * 2 + (1 - 2**24)
    return numerator.astype(np.float32) * np.float32(std * math.sqrt(3.0) * 2.0**-24)
