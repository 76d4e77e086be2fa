"""Activations and gradients in 5 or 3 bits a value, rounded without bias and without cutting any value off.

Dithered quantization (Roberts 1962; Schuchman 1964): the sender adds to each value an offset that is evenly
spread over one step, rounds, and the receiver subtracts the same offset. The error is then evenly spread over
one step whatever the values are, so it vanishes in the mean over many tokens. Rounding to the nearest level
does not have that: a gradient of few bits is wrong in the same direction at every token.

The offsets follow from the place of a value alone, as in the ordered dither of images: no frame carries them,
and all devices compute the same. The step of a token follows from its largest absolute value. It travels as
one byte, a power of 2^(1/4).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.algorithm.quantizers.quantizer import Shape, little_endian
from protocol.algorithm.quantizers.step_codes import divisors, factors, step_codes
from protocol.types import DType, TensorHeader

_OF_TOKEN, _OF_VALUE = 0x91E1, 0xC13F
"""Offsets advance by these fractions of 2^16 from token to token, and from value to value.

They are 1/p^2 and 1/p of the plastic ratio p: neighbours in both directions are unlike (R2, Roberts 2018).
"""
_GROUP = 8
"""Values that are packed together: 8 of n bits fill n bytes."""


class Dithered:
    """Link values in 2^bits levels. The second array: step codes.

    A token that holds a value that is not finite becomes NaN as a whole. A token whose step would be below
    2^-48 becomes zeros.

    Args:
        bits: 2 to 7.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self._half = bits, 1 << (bits - 1)

    def parts(self, rows: Shape) -> tuple[TensorHeader, ...]:
        packed = (*rows[:-1], -(-rows[-1] * self._bits // 8))
        return TensorHeader("", DType.U8, packed), TensorHeader("scale", DType.U8, rows[:-1])

    def pack(self, values: Tensor, rows: Shape) -> list[NDArray[Any]]:
        x_blk = values.to(torch.float32)
        code_bl = self._step_codes(x_blk)
        level_blk = x_blk / divisors(code_bl).unsqueeze(-1) + _offsets(rows, x_blk.device)
        # NaN has no integer value. The code of such a token says that, so its levels do not matter.
        level_blk = level_blk.floor_().add_(self._half).nan_to_num_(0.0).clamp_(0, 2 * self._half - 1)
        return [little_endian(self._packed(level_blk.long())), little_endian(code_bl)]

    def unpack(self, parts: Sequence[NDArray[np.uint8]], rows: Shape) -> Tensor:
        # Copies: torch warns of memory that it must not write to.
        packed = torch.from_numpy(parts[0].copy()).view(*rows[:-1], -1)
        code_bl = torch.from_numpy(parts[1].copy()).view(rows[:-1])
        level_blk = self._unpacked(packed)[..., : rows[-1]]
        middle_blk = level_blk.float() - (self._half - 0.5) - _offsets(rows, level_blk.device)
        return middle_blk.mul_(factors(code_bl).unsqueeze(-1))

    def _step_codes(self, x_blk: Tensor) -> Tensor:
        # Rounded up: no value, moved by up to half a step, is beyond the outermost levels.
        return step_codes(x_blk.abs().amax(dim=-1) / (self._half - 0.5), torch.ceil)

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


def _offsets(rows: Shape, device: torch.device) -> Tensor:
    """From -1/2 to 1/2, evenly spread over tokens and over values, float32 of the shape `rows`.

    Odd multiples of 2^-17, made of integers: the same on every device.
    """
    token_n1 = (torch.arange(prod(rows[:-1]), device=device) * _OF_TOKEN % 2**16).int().unsqueeze(-1)
    value_k = (torch.arange(rows[-1], device=device) * _OF_VALUE % 2**16).int()
    place_nk = (token_n1 + value_k).bitwise_and_(0xFFFF)
    return place_nk.float().div_(2**16).sub_(0.5 - 2**-17).view(rows)


def _shifts(count: int, bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * bits, bits, device=device)
