"""Values in few bits: the best magnitudes, and what a receiver makes of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.math.quantizers import magnitudes as magnitudes_module
from protocol.math.quantizers.magnitudes import OneBit, TwoBits, fit_magnitudes
from protocol.math.quantizers.quantizer import QuantizedValues

VALUES = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=9).map(
    lambda values: np.array(values, np.float32)
)


def squared_error(absolute: NDArray[np.float32], magnitudes: NDArray[np.float32]) -> float:
    distances = absolute[:, None].astype(np.float64) - magnitudes
    return float((distances**2).min(axis=1).sum())


def quantize(values_s: NDArray[np.float32], count: int) -> QuantizedValues:
    return {1: OneBit, 2: TwoBits}[count]().quantize(values_s)


def received(quantized: QuantizedValues) -> NDArray[np.float32]:
    codes_s, magnitudes = quantized
    assert magnitudes is not None
    signed: NDArray[np.float32] = np.concatenate((magnitudes, -magnitudes))
    return signed[codes_s]


@given(VALUES, st.sampled_from([2, 1 << 16]))
def test_two_magnitudes_are_the_best_of_all_ways_to_split_the_values_in_two(
    values: NDArray[np.float32], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(magnitudes_module, "BLOCK", block)
        low, high = magnitudes = fit_magnitudes(values, 2)
    assert 0 <= low <= high
    exact = values.astype(np.float64)
    best = min(
        sum(((part - part.mean()) ** 2).sum() for part in (exact[mask], exact[~mask]) if len(part))
        for mask in map(np.array, itertools.product([False, True], repeat=len(values)))
    )
    assert squared_error(values, magnitudes) <= best + 1e-6 * (1 + (exact**2).sum())


@given(VALUES)
def test_one_magnitude_is_the_mean(values: NDArray[np.float32]) -> None:
    (magnitude,) = fit_magnitudes(values, 1)
    assert magnitude == pytest.approx(values.astype(np.float64).mean(), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_codes_keep_the_sign_and_take_the_nearer_magnitude(count: int) -> None:
    values = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    quantized = quantize(values, count)
    seen = received(quantized)
    assert np.array_equal(np.sign(seen), np.sign(values))
    assert quantized.magnitudes is not None
    nearest = np.abs(np.abs(values)[:, None] - quantized.magnitudes).min(axis=1)
    np.testing.assert_allclose(np.abs(seen - values), nearest, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_zeros_stay_zeros(count: int) -> None:
    assert not received(quantize(np.zeros(5, np.float32), count)).any()


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6),
    st.integers(0, 60),
    st.sampled_from([1, 2]),
)
def test_the_fit_is_free_of_units(values: list[float], exponent: int, count: int) -> None:
    """A power of two changes nothing but the magnitudes, by itself."""
    plain = np.array(values, np.float32)
    plain[np.abs(plain) < 2.0**-20] = 0
    one, other = (quantize(v, count) for v in (plain, np.ldexp(plain, exponent)))
    assert np.array_equal(one.codes_s, other.codes_s)
    assert one.magnitudes is not None
    assert other.magnitudes is not None
    assert np.array_equal(np.ldexp(one.magnitudes, exponent), other.magnitudes)
