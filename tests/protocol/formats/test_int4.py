"""Values in 4 bits: what is packed comes back as near as theory allows, and any bytes can be read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protocol.formats.int4 import STEP_OF_RMS, Int4


def packed(x_blk: torch.Tensor) -> list[np.ndarray]:
    return Int4().pack(x_blk, tuple(x_blk.shape))


def received(x_blk: torch.Tensor) -> torch.Tensor:
    """What a neighbour sees of `x_blk`."""
    shape = tuple(x_blk.shape)
    raw = [np.frombuffer(array.tobytes(), np.uint8) for array in packed(x_blk)]
    return Int4().unpack(raw, shape)


def oracle(x_k: np.ndarray) -> np.ndarray:
    """One token value by value, in float64, without packing."""
    rms = math.sqrt(float(np.mean(np.square(x_k, dtype=np.float64))))
    if rms * STEP_OF_RMS < 2.0**-48:
        return np.zeros_like(x_k)
    step = 2.0 ** (round(4 * math.log2(rms * STEP_OF_RMS)) / 4)
    return np.array([min(max(math.floor(x / step) + 0.5, -7.5), 7.5) * step for x in x_k])


@pytest.mark.parametrize("width", [1, 2, 5, 6, 64])
def test_values_are_those_of_a_plain_loop(width: int) -> None:
    x_blk = torch.randn(2, 50, width, generator=torch.Generator().manual_seed(width)) * 3e-6
    assert packed(x_blk)[0].shape == (2, 50, (width + 1) // 2)
    got = received(x_blk)
    expected = np.apply_along_axis(oracle, -1, x_blk.double().numpy())
    differing = ~np.isclose(got.numpy(), expected, rtol=1e-5, atol=0)
    assert differing.mean() < 0.005, "only a value at the edge of two levels may fall to the other one"


def test_a_gaussian_loses_what_the_best_uniform_quantizer_loses() -> None:
    x_blk = torch.randn(4, 256, 256, generator=torch.Generator().manual_seed(0))
    error = received(x_blk) - x_blk
    share = float(error.square().sum() / x_blk.square().sum())
    # The step is a power of 2^(1/4), so up to 9 % off the best one.
    assert 0.97 * 0.01154 < share < 1.08 * 0.01154


@given(
    arrays.arrays(np.float32, (3, 7), elements=st.floats(-1e4, 1e4, width=32)),
    st.sampled_from([1e-9, 1e-3, 1.0]),
)
def test_signs_are_kept_and_no_value_grows_much(x: np.ndarray, scale: float) -> None:
    x_blk = torch.from_numpy(x * np.float32(scale)).unsqueeze(0)
    got = received(x_blk)
    rms_bl = x_blk.square().mean(-1, keepdim=True).sqrt()
    assert ((got * x_blk >= 0) | (got.abs() <= rms_bl)).all()
    assert (got.abs() <= x_blk.abs() + 1.2 * STEP_OF_RMS * rms_bl + 1e-30).all()


def test_tokens_of_zeros_stay_zeros_and_tokens_that_are_not_finite_become_nan() -> None:
    x_blk = torch.ones(1, 6, 6)
    x_blk[0, 0] = 0
    x_blk[0, 1, 3], x_blk[0, 2, 3], x_blk[0, 3, 3], x_blk[0, 4, 3] = math.nan, math.inf, 3e38, 1e6
    got = received(x_blk)
    assert torch.equal(got[0, 0], torch.zeros(6))
    assert got[0, 1:5].isnan().all(), "nor are squares that overflow, and values that no step reaches, finite"
    assert got[0, 5].isfinite().all()


@given(st.data())
def test_any_bytes_can_be_read(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 9))
    levels = data.draw(arrays.arrays(np.uint8, 2 * ((width + 1) // 2)))
    codes = data.draw(arrays.arrays(np.uint8, 2))
    got = Int4().unpack([levels, codes], (1, 2, width))
    assert got.shape == (1, 2, width)
    assert not got.isinf().any()
