"""Rounding of the values of a token to a few levels, with a step that suits a Gaussian.

The values x [k] of a token have nearly a Gaussian's distribution, since the basis of a link is a random
rotation. They are rounded to the odd multiples of half a step around 0, `half` of them on either side. The
step is the one that loses least of a Gaussian (the uniform quantizer of Max, 1960), in units of their root
mean square. It travels as one byte, a power of 2^(1/4).

Shapes: b micro-batch, L tokens, k values of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PER_OCTAVE = 4
_UNIT = 192
"""The code of step 1: codes reach from 2^-47.75 to 2^15.5."""
_ZERO, _NOT_FINITE = 0, 255


def step_codes(x_blk: Tensor, step_of_rms: float) -> Tensor:
    """The code of each token's step, uint8 [b, L].

    A token that holds a value that is not finite gets a code of its own, and so does one whose step would be
    below 2^-48.
    """
    rms_bl = x_blk.square().mean(dim=-1).sqrt()
    exponent_bl = _PER_OCTAVE * (rms_bl * step_of_rms).log2() + _UNIT
    # log2(0) is -inf: a token of zeros gets the code _ZERO.
    code_bl = exponent_bl.round().clamp(_ZERO, _NOT_FINITE - 1)
    return torch.where(rms_bl.isfinite(), code_bl, _NOT_FINITE).to(torch.uint8)


def steps(code_bl: Tensor) -> Tensor:
    """The step of each code, float32 [b, L]."""
    return torch.exp2((code_bl.to(torch.float32) - _UNIT) / _PER_OCTAVE)


def levels(x_blk: Tensor, code_bl: Tensor, half: int) -> Tensor:
    """The level of each value, uint8 [b, L, k], below 2 `half`."""
    level_blk = (x_blk / steps(code_bl).unsqueeze(-1)).floor_().add_(half)
    # NaN has no integer value. The code of such a token is _NOT_FINITE, so its levels do not matter.
    return level_blk.nan_to_num_(half).clamp_(0, 2 * half - 1).to(torch.uint8)


def values(level_blk: Tensor, code_bl: Tensor, half: int) -> Tensor:
    """The values that levels stand for, float32 [b, L, k]; zeros or NaN where the code says so."""
    step_bl = torch.where(code_bl == _ZERO, 0.0, steps(code_bl))
    step_bl = torch.where(code_bl == _NOT_FINITE, torch.nan, step_bl)
    return (level_blk.to(torch.float32) - (half - 0.5)).mul_(step_bl.unsqueeze(-1))
