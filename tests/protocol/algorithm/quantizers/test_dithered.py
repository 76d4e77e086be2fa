"""Dithered values: never off by more than half a step, right in the mean, and any bytes can be read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protocol.algorithm.quantizers.dithered import Dithered

BITS = [2, 3, 5, 7]


def packed(x_blk: torch.Tensor, bits: int) -> list[np.ndarray]:
    return Dithered(bits).pack(x_blk, tuple(x_blk.shape))


def received(x_blk: torch.Tensor, bits: int) -> torch.Tensor:
    """What a neighbour sees of `x_blk`."""
    raw = [np.frombuffer(array.tobytes(), np.uint8) for array in packed(x_blk, bits)]
    return Dithered(bits).unpack(raw, tuple(x_blk.shape))


def steps(x_blk: torch.Tensor, bits: int) -> torch.Tensor:
    """The step of each token: the least power of 2^(1/4) that reaches its largest value."""
    largest_bl1 = x_blk.double().abs().amax(-1, keepdim=True)
    return torch.exp2((4 * (largest_bl1 / (2 ** (bits - 1) - 0.5)).log2()).ceil() / 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [1, 5, 8, 62, 64])
def test_no_value_is_off_by_more_than_half_a_step(bits: int, width: int) -> None:
    x_blk = torch.randn(2, 50, width, generator=torch.Generator().manual_seed(width)).pow(3) * 3e-6
    assert packed(x_blk, bits)[0].shape == (2, 50, -(-width * bits // 8))
    assert ((received(x_blk, bits) - x_blk).abs() <= 0.5001 * steps(x_blk, bits)).all()


@pytest.mark.parametrize("bits", BITS)
def test_the_error_has_the_size_of_an_evenly_spread_one_and_does_not_depend_on_the_values(bits: int) -> None:
    x_blk = torch.randn(8, 128, 62, generator=torch.Generator().manual_seed(0))
    error_blk = (received(x_blk, bits) - x_blk) / steps(x_blk, bits)
    assert float(error_blk.square().mean()) == pytest.approx(1 / 12, rel=0.02)
    assert abs(float((error_blk * x_blk).mean())) < 0.003


@pytest.mark.parametrize("value", [0.01, 0.2, 0.37, -0.9])
def test_a_small_value_that_all_tokens_have_is_right_in_the_mean(value: float) -> None:
    """Beside a large one, with 3 bits: rounding to the nearest level would give 1/7 of it, or more."""
    x_blk = torch.full((8, 128, 16), value)
    x_blk[..., 0] = 7.0
    got_k = received(x_blk, 3).mean(dim=(0, 1))
    assert (got_k[1:] - value).abs().max() < 0.02
    assert float(received(x_blk, 3)[..., 1:].std()) > 0.4, "one token alone is far off"


def test_bits_follow_one_another_from_the_lowest_on() -> None:
    """Plain bits of 10 values of 3 bits: 30 bits, 4 bytes."""
    x_blk = torch.linspace(-1, 1, 10).view(1, 1, 10)
    offset_k = [value * 0xC13F % 2**16 / 2**16 - 0.5 + 2**-17 for value in range(10)]
    step = float(steps(x_blk, 3))
    levels = [
        math.floor(x / step + offset) + 4 for x, offset in zip(x_blk[0, 0].tolist(), offset_k, strict=True)
    ]
    whole = sum(level << 3 * place for place, level in enumerate(levels))
    assert packed(x_blk, 3)[0].tobytes() == whole.to_bytes(4, "little")


def test_tokens_of_zeros_stay_zeros_and_tokens_that_are_not_finite_become_nan() -> None:
    x_blk = torch.ones(1, 5, 6)
    x_blk[0, 0] = 0
    x_blk[0, 1, 3], x_blk[0, 2, 3], x_blk[0, 3, 3] = math.nan, math.inf, -math.inf
    for bits in BITS:
        got = received(x_blk, bits)
        assert torch.equal(got[0, 0], torch.zeros(6))
        assert got[0, 1:4].isnan().all()
        assert got[0, 4].isfinite().all()


@pytest.mark.parametrize("source", [torch.float64, torch.bfloat16])
def test_values_of_any_float_format_are_packed(source: torch.dtype) -> None:
    x_blk = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0)).to(source)
    assert torch.equal(received(x_blk, 5), received(x_blk.float(), 5))


@given(st.data())
def test_any_bytes_can_be_read(data: st.DataObject) -> None:
    bits, width = data.draw(st.sampled_from(BITS)), data.draw(st.integers(1, 9))
    levels = data.draw(arrays.arrays(np.uint8, 2 * -(-width * bits // 8)))
    codes = data.draw(arrays.arrays(np.uint8, 2))
    got = Dithered(bits).unpack([levels, codes], (1, 2, width))
    assert got.shape == (1, 2, width)
    assert not got.isinf().any()
