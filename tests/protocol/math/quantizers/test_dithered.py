"""Dithered values: never off by more than half a step, right in the mean, and any bytes can be read."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protocol.math.quantizers.dithered import Dithered

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
    assert (got_k[1:] - value).abs().max() < 0.07
    assert float(received(x_blk, 3)[..., 1:].std()) > 0.4, "one token alone is far off"


def plain_offset(place: int) -> Fraction:
    """As docs/protocol/pipeline.md defines it."""
    x = place
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    x ^= x >> 16
    return Fraction(2 * (x // 2**16) + 1, 2**17) - Fraction(1, 2)


@pytest.mark.parametrize(("bits", "width"), [(3, 10), (5, 7), (5, 62)])
def test_the_bytes_are_those_of_a_plain_loop(bits: int, width: int) -> None:
    """Of exact fractions; in a frame of 1,500 tokens, from which every 13th is compared."""
    x_blk = torch.randn(3, 500, width, generator=torch.Generator().manual_seed(bits)) * 3e-6
    levels, codes = (array.reshape(1500, -1) for array in packed(x_blk, bits))
    got_nk = received(x_blk, bits).view(1500, -1).tolist()
    for token in range(0, 1500, 13):
        step = float(steps(x_blk, bits).view(-1)[token])
        assert codes[token] == 192 + round(4 * math.log2(step))
        whole = 0
        for value in range(width):
            offset = plain_offset(token * width + value)
            scaled = Fraction(float(x_blk.view(1500, -1)[token, value] / np.float32(step)))
            level = math.floor(scaled + offset) + 2 ** (bits - 1)
            whole |= level << bits * value
            expected = float(level - 2 ** (bits - 1) + Fraction(1, 2) - offset)
            assert abs(got_nk[token][value] / step - expected) < 2**-19
        assert levels[token].tobytes() == whole.to_bytes(-(-bits * width // 8), "little")


def test_small_values_get_errors_in_all_directions() -> None:
    """Offsets that were sums of one of the token and one of the value would put most of them into two."""
    x_blk = torch.zeros(8, 128, 62)
    x_blk[..., 0] = 7.0
    energy = torch.linalg.svdvals(received(x_blk, 3)[..., 1:].flatten(0, 1)).square()
    assert float(energy[:2].sum() / energy.sum()) < 0.08


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e4])
def test_values_of_all_sizes_can_be_sent(bits: int, size: float) -> None:
    x_blk = torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(bits)) * size
    x_blk[0, 0] = (2 ** (bits - 1) - 0.5) * 2.0 ** math.floor(math.log2(size))  # exactly the outermost levels
    x_blk[0, 0, ::2] *= -1
    assert ((received(x_blk, bits) - x_blk).abs() <= 0.5001 * steps(x_blk, bits)).all()


def test_values_that_no_step_reaches_are_not_cut_off_but_not_a_number() -> None:
    x_blk = torch.ones(1, 2, 6)
    x_blk[0, 1, 2] = 3.5 * 2**15.6
    got = received(x_blk, 3)
    assert got[0, 0].isfinite().all()
    assert got[0, 1].isnan().all()


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
