"""Activations and gradients in 5 or 3 bits a value, rounded without bias and without cutting any value off.

Dithered quantization (Roberts 1962; Schuchman 1964): the sender adds to each value an offset from half a
step below 0 to half a step above, rounds, and the receiver subtracts the same offset. The error is then
spread over one step whatever the value is, so it vanishes in the mean over many tokens. Rounding to the
nearest level does not have that: a gradient of few bits is wrong in the same way at every token.

The offset is a hash of the place of a value in the frame, moved by a hash of the frame
(:mod:`protocol.math.frame_shift`). So no frame carries offsets, no end keeps a state, and every device
computes the same. The errors of two frames are independent at every place, so they vanish in the mean over
steps, links and replicas, too. The step of a token follows from its largest absolute value.

Shapes: b micro-batch, L tokens, k values of a token that cross the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.math.frame_shift import hashed
from protocol.math.quantizers.quantizer import Shape, little_endian
from protocol.types import DType, TensorHeader

_GROUP = 8
"""Values that are packed together: 8 of n bits fill n bytes."""
_PER_OCTAVE = 4
_UNIT = 192
"""The code of step 1: codes of steps, in one byte, reach from 2^-47.75 to 2^15.5."""
_ZERO, _NOT_FINITE = 0, 255


class Dithered:
    """Link values in 2^bits levels. The second array: step codes.

    A token that holds a value that is not finite, or that needs a step above 2^15.5, becomes NaN as a whole.
    A token whose step would be below 2^-48 becomes zeros.

    Args:
        bits: 2 to 7.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self._half = bits, 1 << (bits - 1)

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        packed = (*rows[:-1], -(-rows[-1] * self._bits // 8))
        return TensorHeader("", DType.U8, packed), TensorHeader("scale", DType.U8, rows[:-1])

    def pack(self, values: Tensor, rows: Shape, shift: int = 0) -> list[NDArray[Any]]:
        x_blk = values.to(torch.float32)
        code_bl = self._step_codes(x_blk)
        level_blk = x_blk / _divisors(code_bl).unsqueeze(-1) + _offsets(rows, shift, x_blk.device)
        # NaN has no integer value. The code of such a token says that, so its levels do not matter.
        level_blk = level_blk.floor_().add_(self._half).nan_to_num_(0.0).clamp_(0, 2 * self._half - 1)
        return [little_endian(self._packed(level_blk.long())), little_endian(code_bl)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape, shift: int = 0) -> Tensor:
        # Copies: torch warns of memory that it must not write to.
        packed = torch.from_numpy(parts[0].copy()).view(*rows[:-1], -1)
        code_bl = torch.from_numpy(parts[1].copy()).view(rows[:-1])
        level_blk = self._unpacked(packed)[..., : rows[-1]]
        x_blk = level_blk.float().sub_(self._half - 0.5).sub_(_offsets(rows, shift, level_blk.device))
        return x_blk.mul_(_factors(code_bl).unsqueeze(-1))

    def _step_codes(self, x_blk: Tensor) -> Tensor:
        """Codes, uint8 [b, L], of the steps of tokens, powers of 2^(1/4)."""
        step_bl = x_blk.abs().amax(dim=-1) / (self._half - 0.5)
        # Rounded up: no value, moved by up to half a step, is beyond the outermost levels.
        # log2(0) is -inf: a token of zeros gets the code _ZERO. NaN is not below anything.
        code_bl = (_PER_OCTAVE * step_bl.log2() + _UNIT).ceil().clamp_min(_ZERO)
        return torch.where(code_bl < _NOT_FINITE, code_bl, _NOT_FINITE).to(torch.uint8)

    def _packed(self, level_blk: Tensor) -> Tensor:
        """The bits of the levels [..., k], each from its lowest on, in bytes [..., ceil(k bits / 8)]."""
        *rows, width = level_blk.shape
        padded = torch.nn.functional.pad(level_blk, (0, -width % _GROUP)).view(*rows, -1, _GROUP)
        words = (padded << _shifts(_GROUP, self._bits, padded.device)).sum(dim=-1, keepdim=True)
        packed = ((words >> _shifts(self._bits, 8, words.device)) & 0xFF).to(torch.uint8)
        return packed.flatten(-2)[..., : -(-width * self._bits // 8)]

    def _unpacked(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`_packed`, with the values that fill the last group."""
        *rows, nbytes = packed.shape
        padded = torch.nn.functional.pad(packed, (0, -nbytes % self._bits)).view(*rows, -1, self._bits)
        words = (padded.long() << _shifts(self._bits, 8, packed.device)).sum(dim=-1, keepdim=True)
        level_blk = (words >> _shifts(_GROUP, self._bits, packed.device)) & (2 * self._half - 1)
        return level_blk.flatten(-2)


class FiveBits(Dithered):
    """32 levels: enough for activations."""

    def __init__(self) -> None:
        super().__init__(5)


class ThreeBits(Dithered):
    """8 levels: enough for gradients, whose error vanishes in the mean over tokens."""

    def __init__(self) -> None:
        super().__init__(3)


def _divisors(code_bl: Tensor) -> Tensor:
    """The steps by which a sender divides, float32 [b, L]: never 0, and always finite."""
    return torch.exp2((code_bl.to(torch.float32) - _UNIT) / _PER_OCTAVE)


def _factors(code_bl: Tensor) -> Tensor:
    """The steps with which a receiver multiplies, float32 [b, L]: 0 for zeros, NaN for a not finite token."""
    step_bl = torch.where(code_bl == _ZERO, 0.0, _divisors(code_bl))
    return torch.where(code_bl == _NOT_FINITE, torch.nan, step_bl)


def _offsets(rows: Shape, shift: int, device: torch.device) -> Tensor:
    """The offset of each value in units of its step, float32 of the shape `rows`: odd multiples of 2^-17."""
    moved = (_places(rows, device) + shift) & 0xFFFF
    return moved.float().div_(2**16).sub_(0.5 - 2**-17)


@lru_cache(maxsize=4)
def _places(rows: Shape, device: torch.device) -> Tensor:
    """The upper half of the hash of each place, int32 of the shape `rows`.

    The last four results are kept, since links have few shapes. Callers must not change them.
    """
    return (hashed(torch.arange(prod(rows), device=device)) >> 16).to(torch.int32).view(rows)


def _shifts(count: int, bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * bits, bits, device=device)
