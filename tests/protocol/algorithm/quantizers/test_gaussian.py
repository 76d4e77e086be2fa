"""Values in 4 or 3 bits: what is packed comes back as near as theory allows, and any bytes can be read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protocol.algorithm.quantizers import int3, int4
from protocol.algorithm.quantizers.int3 import Int3
from protocol.algorithm.quantizers.int4 import Int4
from protocol.algorithm.quantizers.quantizer import LinkQuantizer

BITS: dict[int, tuple[LinkQuantizer, float, float]] = {
    4: (Int4(), int4.STEP_OF_RMS, 0.01154),
    3: (Int3(), int3.STEP_OF_RMS, 0.03744),
}
"""By bits: the quantizer, its step, and what the best uniform one loses of a Gaussian (Max, 1960)."""
bits_of_values = pytest.mark.parametrize("bits", BITS)


def packed(bits: int, x_blk: torch.Tensor) -> list[np.ndarray]:
    return BITS[bits][0].pack(x_blk, tuple(x_blk.shape))


def received(bits: int, x_blk: torch.Tensor) -> torch.Tensor:
    """What a neighbour sees of `x_blk`."""
    shape = tuple(x_blk.shape)
    raw = [np.frombuffer(array.tobytes(), np.uint8) for array in packed(bits, x_blk)]
    return BITS[bits][0].unpack(raw, shape)


def oracle(x_k: np.ndarray, bits: int) -> np.ndarray:
    """One token value by value, in float64, without packing."""
    rms = math.sqrt(float(np.mean(np.square(x_k, dtype=np.float64))))
    step_of_rms, end = BITS[bits][1], 2 ** (bits - 1) - 0.5
    if rms * step_of_rms < 2.0**-48:
        return np.zeros_like(x_k)
    step = 2.0 ** (round(4 * math.log2(rms * step_of_rms)) / 4)
    return np.array([min(max(math.floor(x / step) + 0.5, -end), end) * step for x in x_k])


@bits_of_values
@pytest.mark.parametrize("width", [1, 2, 3, 5, 6, 8, 9, 64, 82])
def test_values_are_those_of_a_plain_loop(width: int, bits: int) -> None:
    x_blk = torch.randn(2, 50, width, generator=torch.Generator().manual_seed(width)) * 3e-6
    assert packed(bits, x_blk)[0].shape == (2, 50, math.ceil(width * bits / 8))
    got = received(bits, x_blk)
    expected = np.apply_along_axis(oracle, -1, x_blk.double().numpy(), bits)
    differing = ~np.isclose(got.numpy(), expected, rtol=1e-5, atol=0)
    assert differing.mean() < 0.005, "only a value at the edge of two levels may fall to the other one"


@bits_of_values
def test_a_gaussian_loses_what_the_best_uniform_quantizer_loses(bits: int) -> None:
    x_blk = torch.randn(4, 256, 256, generator=torch.Generator().manual_seed(0))
    error = received(bits, x_blk) - x_blk
    share = float(error.square().sum() / x_blk.square().sum())
    # The step is a power of 2^(1/4), so up to 9 % off the best one.
    least = BITS[bits][2]
    assert 0.97 * least < share < 1.08 * least


@bits_of_values
@given(
    arrays.arrays(np.float32, (3, 7), elements=st.floats(-1e4, 1e4, width=32)),
    st.sampled_from([1e-9, 1e-3, 1.0]),
)
def test_signs_are_kept_and_no_value_grows_much(bits: int, x: np.ndarray, scale: float) -> None:
    x_blk = torch.from_numpy(x * np.float32(scale)).unsqueeze(0)
    got = received(bits, x_blk)
    rms_bl = x_blk.square().mean(-1, keepdim=True).sqrt()
    assert ((got * x_blk >= 0) | (got.abs() <= rms_bl)).all()
    assert (got.abs() <= x_blk.abs() + 1.2 * BITS[bits][1] * rms_bl + 1e-30).all()


@bits_of_values
def test_tokens_of_zeros_stay_zeros_and_tokens_that_are_not_finite_become_nan(bits: int) -> None:
    x_blk = torch.ones(1, 5, 6)
    x_blk[0, 0] = 0
    x_blk[0, 1, 3], x_blk[0, 2, 3], x_blk[0, 3, 3] = math.nan, math.inf, 3e38
    got = received(bits, x_blk)
    assert torch.equal(got[0, 0], torch.zeros(6))
    assert got[0, 1:4].isnan().all(), "squares that overflow are not finite, either"
    assert got[0, 4].isfinite().all()


@bits_of_values
@given(data=st.data())
def test_any_bytes_can_be_read(bits: int, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 9))
    levels = data.draw(arrays.arrays(np.uint8, 2 * math.ceil(width * bits / 8)))
    codes = data.draw(arrays.arrays(np.uint8, 2))
    got = BITS[bits][0].unpack([levels, codes], (1, 2, width))
    assert got.shape == (1, 2, width)
    assert not got.isinf().any()
