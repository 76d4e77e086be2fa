"""The step of a token in one byte: a power of 2^(1/4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_PER_OCTAVE = 4
_UNIT = 192
"""The code of step 1: codes reach from 2^-47.75 to 2^15.5."""
_ZERO, _NOT_FINITE = 0, 255


def step_codes(step_bl: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Codes, uint8 [b, L], of the wanted steps, float32 [b, L], as `rounded` to a power of 2^(1/4).

    A step that rounds to 2^-48 or less gets the code of zeros. One that rounds to more than 2^15.5, or is not
    finite, gets the code of a token that is not finite: its values could not be represented.
    """
    # log2(0) is -inf: a token of zeros gets the code _ZERO. NaN is not below anything.
    code_bl = rounded(_PER_OCTAVE * step_bl.log2() + _UNIT).clamp_min(_ZERO)
    return torch.where(code_bl < _NOT_FINITE, code_bl, _NOT_FINITE).to(torch.uint8)


def divisors(code_bl: Tensor) -> Tensor:
    """The steps by which a sender divides, float32 [b, L]: never 0, and always finite."""
    return torch.exp2((code_bl.to(torch.float32) - _UNIT) / _PER_OCTAVE)


def factors(code_bl: Tensor) -> Tensor:
    """The steps with which a receiver multiplies, float32 [b, L]: 0 for zeros, NaN for a not finite token."""
    step_bl = torch.where(code_bl == _ZERO, 0.0, divisors(code_bl))
    return torch.where(code_bl == _NOT_FINITE, torch.nan, step_bl)
