"""Values in few bits: the best magnitudes, the nearest scales, and what a receiver makes of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.algorithm.quantizers import magnitudes as magnitudes_module
from protocol.algorithm.quantizers.magnitudes import (
    SCALES,
    OneBit,
    TwoBits,
    fit_magnitudes,
    fit_scales,
    value_table,
)
from protocol.algorithm.quantizers.quantizer import QuantizedValues

VALUES = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=9).map(
    lambda values: np.array(values, np.float32)
)


def squared_error(absolute: NDArray[np.float32], magnitudes: NDArray[np.float32]) -> float:
    distances = absolute[:, None].astype(np.float64) - magnitudes
    return float((distances**2).min(axis=1).sum())


def quantize(
    values_s: NDArray[np.float32], count: int, lengths_c: NDArray[np.int64] | None
) -> QuantizedValues:
    """With `count` magnitudes; with scales if `lengths_c` cut the values into chunks."""
    quantizer = {1: OneBit, 2: TwoBits}[count](scaled=lengths_c is not None)
    return quantizer.quantize(values_s, np.array([len(values_s)]) if lengths_c is None else lengths_c)


def received(quantized: QuantizedValues) -> NDArray[np.float32]:
    codes_s, magnitudes, scales_s = quantized
    assert magnitudes is not None
    table = value_table(magnitudes, scales_s is not None)
    return table[codes_s] if scales_s is None else table[scales_s, codes_s]


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
    quantized = quantize(values, count, None)
    assert quantized.scales_s is None
    seen = received(quantized)
    assert np.array_equal(np.sign(seen), np.sign(values))
    assert quantized.magnitudes is not None
    nearest = np.abs(np.abs(values)[:, None] - quantized.magnitudes).min(axis=1)
    np.testing.assert_allclose(np.abs(seen - values), nearest, atol=1e-6)


def test_scales_are_floats_of_8_bits_below_1() -> None:
    assert SCALES[0] == 0
    assert SCALES[255] == 31 / 32
    assert SCALES[16 * 15] == 0.5
    assert SCALES[16 * 14 + 4] == 20 / 32 / 2
    assert SCALES[1] == 17 / 32 * 2.0**-15
    assert (np.diff(SCALES) > 0).all()


def test_the_scale_of_a_chunk_is_within_a_32nd_of_its_mean_against_the_largest() -> None:
    means = np.array([1.0, 0.97, 0.5, 0.3, 0.01, 1e-3, 2.0**-15, 1e-9, 0.0])
    lengths = np.array([3, 1, 2, 4, 1, 5, 2, 3, 1])
    values = np.repeat(means, lengths).astype(np.float32)
    scales = SCALES[fit_scales(values, lengths)] / SCALES[255]
    np.testing.assert_allclose(scales[:7], means[:7], rtol=1 / 32)
    assert not scales[7:].any()


@pytest.mark.parametrize(("count", "most"), [(1, 1e-3), (2, 1e-3)])
def test_chunks_of_unlike_size_are_nearly_exact_with_scales_and_far_off_without(
    count: int, most: float
) -> None:
    lengths = np.full(64, 32)
    signs = np.random.default_rng(1).choice([-1, 1], 64 * 32)
    values = (np.repeat(10.0 ** -np.linspace(0, 4, 64), lengths) * signs).astype(np.float32)

    def loss(lengths_c: NDArray[np.int64] | None) -> float:
        error = received(quantize(values, count, lengths_c)).astype(np.float64) - values
        return float((error**2).sum() / (values.astype(np.float64) ** 2).sum())

    assert loss(lengths) < most
    assert loss(None) > 10 * most


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("lengths", [None, np.array([2, 3])])
def test_zeros_stay_zeros(count: int, lengths: NDArray[np.int64] | None) -> None:
    assert not received(quantize(np.zeros(5, np.float32), count, lengths)).any()


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6),
    st.integers(0, 60),
    st.sampled_from([1, 2]),
)
def test_the_fit_is_free_of_units(values: list[float], exponent: int, count: int) -> None:
    """A power of two changes nothing but the magnitudes, by itself."""
    plain = np.array(values, np.float32)
    plain[np.abs(plain) < 2.0**-20] = 0
    lengths = np.array([2, 4])
    one, other = (quantize(v, count, lengths) for v in (plain, np.ldexp(plain, exponent)))
    assert np.array_equal(one.codes_s, other.codes_s)
    assert one.scales_s is not None
    assert other.scales_s is not None
    assert np.array_equal(one.scales_s, other.scales_s)
    assert one.magnitudes is not None
    assert other.magnitudes is not None
    assert np.array_equal(np.ldexp(one.magnitudes, exponent), other.magnitudes)


def test_values_too_large_for_a_scale_per_chunk_are_refused_and_not_sent_as_infinity() -> None:
    values_s = np.full(64, 1e38, np.float32)
    values_s[32:] = [3e38, *[0.0] * 31]
    with pytest.raises(FloatingPointError):
        quantize(values_s, 2, np.array([32, 32]))
