"""Dithered values: never off by more than half a step, right in the mean, and any bytes can be read."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from protocol.formats.dithered import Dithered
from protocol.math.frame_shift import shift_of
from protocol.run_files.resolve import resolve
from protocol.types import StageRange

BITS = [2, 3, 5, 7]


FRAME = st.tuples(
    *(st.integers(1, 10**7), st.integers(0, 10**5), st.integers(0, 2**20)),
    *(st.integers(1, 511), st.integers(0, 2), st.integers(0, 20_000)),
)
"""Round, step, microbatch, boundary, direction and replica."""


def packed(x_blk: torch.Tensor, bits: int, shift: int = 0) -> list[np.ndarray]:
    return Dithered(bits).pack(x_blk, tuple(x_blk.shape), shift)


def received(x_blk: torch.Tensor, bits: int, shift: int = 0) -> torch.Tensor:
    """What a neighbour sees of `x_blk`."""
    raw = [np.frombuffer(array.tobytes(), np.uint8) for array in packed(x_blk, bits, shift)]
    return Dithered(bits).unpack(raw, tuple(x_blk.shape), shift)


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


@given(FRAME, st.integers(0, 5), st.integers(1, 9))
def test_frames_that_differ_in_one_number_have_other_offsets(
    frame: tuple[int, ...], which: int, more: int
) -> None:
    """Two of 65,536 shifts are equal now and then; two numbers never have the same ones in a row."""
    other = [*frame]
    other[which] += more
    here, there = (
        [shift_of(*each[:2], each[2] + at, *each[3:]) for at in range(4)] for each in (frame, tuple(other))
    )
    assert which == 2 or here != there
    assert here[0] != there[0] or here != there


def test_the_shifts_of_all_frames_of_a_small_run_are_spread_evenly() -> None:
    shifts = np.array(
        [
            shift_of(round_number, step, microbatch, boundary, direction, replica)
            for round_number in range(1, 9)
            for step in range(8)
            for microbatch in range(4)
            for boundary in (1, 2, 3)
            for direction in (0, 1)
            for replica in range(8)
        ]
    )
    counts = np.bincount(shifts // 1024, minlength=64)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 110  # chi-square, 63 degrees: 1 in 5,000
    assert len(np.unique(shifts)) > 0.9 * 65536 * (1 - math.exp(-len(shifts) / 65536))
    parts = shifts.reshape(8, 8, 4, 3, 2, 8) / 65536 - 0.5
    for axis in range(6):
        first, second = parts.take(0, axis).ravel(), parts.take(1, axis).ravel()
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.1, axis


@pytest.mark.parametrize("bits", [3, 5])
def test_the_mean_over_steps_links_and_replicas_is_unbiased_at_every_place(bits: int) -> None:
    """With the same offsets in each frame, the mean would be as wrong as one frame is."""
    x_blk = torch.full((1, 16, 8), 0.31)
    x_blk[..., 0] = 2 ** (bits - 1) - 0.5  # a step of 1
    frames = list(product((1, 2), range(64), (0,), (1,), (0, 1), range(4)))
    errors = torch.stack([received(x_blk, bits, shift_of(*each)) - x_blk for each in frames])
    assert float(errors[0].abs().mean()) > 0.2
    spread = math.sqrt(1 / 12 / len(frames))
    assert float(errors.mean(dim=0).abs().max()) < 5 * spread
    assert float(errors.mean(dim=0).square().mean()) == pytest.approx(spread**2, rel=0.4)
    flat = errors.flatten(1)[:, 1:8]
    assert float(torch.corrcoef(torch.stack([flat[:-1].flatten(), flat[1:].flatten()]))[0, 1].abs()) < 0.06


@given(st.integers(0, 65535), st.sampled_from(BITS))
def test_no_shift_moves_a_value_by_more_than_half_a_step(shift: int, bits: int) -> None:
    x_blk = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(bits))
    assert ((received(x_blk, bits, shift) - x_blk).abs() <= 0.5001 * steps(x_blk, bits)).all()


def test_both_ends_of_a_link_have_the_same_offsets_and_others_in_each_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames: list[tuple[int, ...]] = []

    def noted(*frame: int) -> int:
        frames.append(frame)
        return shift_of(*frame)

    monkeypatch.setattr("node.core.worker.hosted_stages.shift_of", noted)
    spec = resolve(
        "nano",
        overrides={"link.dtype": "dither5", "link.gradient_dtype": "dither3", "swarm.stages": 2, "link.k": 8},
    )
    first, last = (Trainer(spec, StageRange(at, at + 1), stream=open_stream(spec)) for at in range(2))
    expected = []
    for replica in (0, 3):
        first.connect(None, 8, replica)
        last.connect(8, None, replica)
        for each in (first, last):
            each.begin_round(2, range(spec.samples_per_round()))
        for step in (0, 1):
            last.forward(step, 0, first.forward(step, 0, None))
            first.backward(0, last.backward(0, None))
            last.evaluate(0, first.evaluate(0, None))
            expected += [(2, step, 0, 1, 0, replica), (2, step, 0, 1, 1, replica), (0, 0, 0, 1, 2, replica)]
            for each in (first, last):
                each.abandon()
    # A round that is named goes before that of the phase, as of steps beyond a phase.
    beyond = spec.inner.steps + 1
    last.forward(beyond, 0, first.forward(beyond, 0, None, round_number=1), round_number=1)
    expected.append((1, beyond, 0, 1, 0, 3))
    assert frames[::2] == frames[1::2] == expected
