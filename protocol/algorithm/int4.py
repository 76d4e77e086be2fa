"""Activations and gradients in 4 bits a value, scaled token by token.

A token's values x [k] are spread as a Gaussian's, since the basis of a link is a random rotation. They are
rounded to the 16 odd multiples of half a step around 0, with the step that loses least of a Gaussian: its
share of the root mean square is that of the uniform quantizer of Max (1960). The step travels as one byte, a
power of 2^(1/4); a token costs ceil(k / 2) + 1 bytes.

For few bits a value there may be many values: what a link loses is mostly what lies outside its k
dimensions, and little of it is rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP_OF_RMS = 0.3352
"""The step in units of the root mean square."""

_HALF = 8
"""Levels on either side of 0."""
_PER_OCTAVE = 4
_UNIT = 192
"""The code of step 1: codes reach from 2^-47.75 to 2^15.5."""
_ZERO, _NOT_FINITE = 0, 255


def packed_width(width: int) -> int:
    """Bytes of `width` values."""
    return -(-width // 2)


def narrow(x_blk: Tensor) -> tuple[Tensor, Tensor]:
    """Packed values [b, L, bytes] and codes of the steps [b, L], uint8, of float32 values.

    A token that holds a value that is not finite becomes NaN as a whole; one whose step would be below 2^-48
    becomes zeros.
    """
    rms_bl = x_blk.square().mean(dim=-1).sqrt()
    exponent_bl = _PER_OCTAVE * (rms_bl * STEP_OF_RMS).log2() + _UNIT
    code_bl = exponent_bl.round().clamp(_ZERO, _NOT_FINITE - 1)
    code_bl = torch.where(rms_bl.isfinite(), code_bl, _NOT_FINITE).to(torch.uint8)
    level_blk = (x_blk / _steps(code_bl).unsqueeze(-1)).floor_().add_(_HALF)
    # NaN has no integer: such tokens are known by their code, and their values do not matter.
    level_blk = level_blk.nan_to_num_(_HALF).clamp_(0, 2 * _HALF - 1).to(torch.uint8)
    padded = torch.nn.functional.pad(level_blk, (0, level_blk.shape[-1] % 2))
    return padded[..., ::2] | padded[..., 1::2] << 4, code_bl


def widen(packed: Tensor, code_bl: Tensor, width: int) -> Tensor:
    """The float32 values [b, L, width] of what :func:`narrow` made; any bytes have a meaning."""
    level_blk = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :width]
    step_bl = torch.where(code_bl == _ZERO, 0.0, _steps(code_bl))
    step_bl = torch.where(code_bl == _NOT_FINITE, torch.nan, step_bl)
    return (level_blk.to(torch.float32) - (_HALF - 0.5)).mul_(step_bl.unsqueeze(-1))


def _steps(code_bl: Tensor) -> Tensor:
    return torch.exp2((code_bl.to(torch.float32) - _UNIT) / _PER_OCTAVE)
