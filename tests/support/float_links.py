"""A number format of links that rounds nothing, for tests that compare replicas in every bit.

Import this module to use :data:`FLOAT32` as `link.dtype`; no run has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.math.quantizers.quantizer import Shape, little_endian
from protocol.spec.quantizers import LINK_QUANTIZERS, QuantizerEntry
from protocol.types import DType, TensorHeader

FLOAT32 = "float32"


class Float32:
    """Link values as float32."""

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        return (TensorHeader("", DType.F32, rows),)

    def pack(self, values: Tensor, rows: Shape, shift: int = 0) -> list[NDArray[Any]]:
        return [little_endian(values.to(torch.float32))]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape, shift: int = 0) -> Tensor:
        return torch.from_numpy(parts[0].view("<f4").astype(np.float32)).view(rows)


LINK_QUANTIZERS[FLOAT32] = QuantizerEntry("tests.support.float_links.Float32", 32)
