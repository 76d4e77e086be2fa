"""What every quantizer does: it turns values into a few arrays of fixed size, and back.

A link quantizes the activations and gradients of a microbatch, one row per token; a payload the values sent
of one tensor, a row each. The size of every array follows from the rows alone, so a receiver knows it.

Shapes: b micro-batch, L tokens, k values of a token, s values sent of a tensor, m magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from protocol.types import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.floating]
Shape = tuple[int, ...]

Values = TypeVar("Values")
Rows_contra = TypeVar("Rows_contra", contravariant=True)


class Quantizer(Protocol[Values, Rows_contra]):
    """Values in few bits each."""

    def parts(self, rows: Rows_contra) -> tuple[TensorHeader, ...]:
        """Name, element type and shape of each array of :meth:`pack` for these rows."""

    def pack(self, values: Values, rows: Rows_contra) -> list[NDArray[Any]]:
        """The arrays, little-endian and row-major. Sizes and shapes are those of :meth:`parts`."""

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Rows_contra) -> Values:
        """The values, on the CPU, from the raw bytes of the arrays of a peer.

        Raises:
            ValueError: a payload's bytes are not what :meth:`pack` gives for any values. On a link all bytes
                have a meaning: values that are not finite pass.
        """


class QuantizedValues(NamedTuple):
    """The values sent of one tensor.

    Attributes:
        codes_s: uint8: the number of the magnitude, plus m where the value is negative; without magnitudes
            the float values themselves.
        magnitudes: float32 [m], ascending, or None.
    """

    codes_s: NDArray[Any]
    magnitudes: NDArray[np.float32] | None = None


class PayloadQuantizer(Quantizer[QuantizedValues, int], Protocol):
    """A quantizer of payloads. The last of its arrays follows the indices, the others precede them.

    Its rows are the number of values sent of one tensor.
    """

    def quantize(self, values_s: Floats) -> QuantizedValues:
        """What a receiver will see of finite values; lossless afterwards."""


class LinkQuantizer(Quantizer["Tensor", Shape], Protocol):
    """A quantizer of links: packs any float tensor [b, L, k] of any device, unpacks float32 on the CPU.

    Both ends give the `shift` of the frame (protocol.math.frame_shift); only dithered formats make use of it.
    """

    def pack(self, values: Tensor, rows: Shape, shift: int = 0) -> list[NDArray[Any]]: ...

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape, shift: int = 0) -> Tensor: ...


def finite(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Raw bytes as float32. Raises ValueError if a value is not finite."""
    values = raw.view("<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("it holds values that are not finite")
    return values


def little_endian(tensor: Tensor) -> NDArray[Any]:
    """`tensor` on the CPU, little-endian and row-major; a view where it is that already."""
    array = np.ascontiguousarray(tensor.numpy(force=True))
    return array.astype(array.dtype.newbyteorder("<"), copy=False)
