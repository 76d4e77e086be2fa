"""The radial merge: an update as long as the payloads are, whatever their number, and no longer."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.math.outer_step import apply_update
from protocol.math.payload_layout import BLOCK
from protocol.math.topk import SparseTensor
from protocol.spec.fixed import PLAIN_CLIP
from protocol.spec.outer import OuterSpec

RADIAL = OuterSpec(merge="radial", clip=PLAIN_CLIP)
MEAN = OuterSpec(clip=PLAIN_CLIP)
SIZE = 64


def update(payloads: Sequence[Tensor], weights: Sequence[float], outer: OuterSpec) -> Tensor:
    """By what one tensor moves, from 0."""
    sent = [{"a": SparseTensor(None, each)} for each in payloads]
    return -apply_update({"a": torch.zeros(len(payloads[0]))}, sent, weights, outer)["a"]


def random_payloads(seed: int, count: int, shared: float) -> list[Tensor]:
    """Payloads of about equal norms, the more alike the greater `shared` is."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(SIZE, generator=generator)
    return [shared * common + torch.randn(SIZE, generator=generator) for _ in range(count)]


def test_orthogonal_payloads_move_the_anchor_as_far_as_one_of_them() -> None:
    for count in (2, 4, 16):
        moved = update(list(torch.eye(SIZE)[:count]), [1.0] * count, RADIAL)
        assert float(moved.norm()) == pytest.approx(1.0)
        assert float(update(list(torch.eye(SIZE)[:count]), [1.0] * count, MEAN).norm()) == pytest.approx(
            1 / math.sqrt(count)
        )


def test_equal_payloads_and_a_single_one_are_their_mean() -> None:
    (payload,) = random_payloads(0, 1, 0.0)
    assert torch.equal(update([payload], [0.3], RADIAL), update([payload], [0.3], MEAN))
    assert torch.allclose(update([payload] * 3, [1.0, 0.5, 2.0], RADIAL), payload)


@given(st.integers(0, 10_000), st.integers(2, 9), st.floats(0, 3), st.data())
def test_the_direction_is_that_of_the_mean_and_the_length_within_its_bounds(
    seed: int, count: int, shared: float, data: st.DataObject
) -> None:
    payloads = random_payloads(seed, count, shared)
    weights = data.draw(st.lists(st.floats(0.05, 20), min_size=count, max_size=count))
    radial, mean = update(payloads, weights, RADIAL), update(payloads, weights, MEAN)
    assert float(torch.dot(radial, mean)) == pytest.approx(float(radial.norm() * mean.norm()), rel=1e-5)
    norms = [w * float(each.norm()) for w, each in zip(weights, payloads, strict=True)]
    longest = sum(norms) / math.hypot(*norms)  # if they were orthogonal
    assert 1 - 1e-5 <= float(radial.norm() / mean.norm()) <= longest * (1 + 1e-5)
    assert float(radial.norm()) <= sum(norms) / sum(weights) * (1 + 1e-5)


def test_who_cancels_the_others_leaves_no_more_than_noise() -> None:
    """Two payloads that differ by a hair only: without the bound that hair would be a whole step."""
    (honest,) = random_payloads(1, 1, 0.0)
    hair = torch.zeros(SIZE)
    hair[3] = 1e-3
    moved = update([honest, hair - honest], [1.0, 1.0], RADIAL)
    assert float(moved.norm()) <= 1e-3


def test_empty_tensors_of_others_give_no_payload_more_say() -> None:
    """A member may put all that clipping leaves it into one tensor, which others leave as it is."""
    (payload,) = random_payloads(3, 1, 0.0)
    others = [torch.zeros(SIZE)] * 14
    assert torch.equal(
        update([payload, *others], [1.0] * 15, RADIAL), update([payload, *others], [1.0] * 15, MEAN)
    )


def test_payloads_that_cancel_each_other_or_are_zero_move_nothing() -> None:
    (honest,) = random_payloads(2, 1, 0.0)
    assert not update([honest, -honest], [1.0, 1.0], RADIAL).any()
    assert not update([torch.zeros(SIZE)] * 2, [1.0, 1.0], RADIAL).any()


def test_norms_are_of_whole_tensors_also_of_more_than_one_block() -> None:
    ones, halves = torch.ones(BLOCK + 5), torch.ones(BLOCK + 5)
    halves[: (BLOCK + 5) // 2] = -1.0
    moved = update([ones, halves], [1.0, 1.0], RADIAL)
    assert float(moved.double().norm()) == pytest.approx(math.sqrt(BLOCK + 5), rel=1e-4)
    ramp = torch.arange(BLOCK + 5, dtype=torch.float32) / BLOCK
    last = update([ramp, ramp.sqrt(), 1 - ramp], [1.0, 0.5, 1.5], RADIAL)[-1]
    assert struct.pack("<f", float(last)).hex() == "3a3a113f"


def test_the_bits_of_a_radial_round_are_these() -> None:
    """A value from one machine, for all others: a replica with other bits would leave the run."""
    ramp = torch.arange(1, 9, dtype=torch.float32) / 7
    payloads = [ramp, ramp.flip(0) * 1.5, 1 / ramp]
    moved = update(payloads, [1.0, 0.3, 1.7], RADIAL)
    assert [struct.pack("<f", value).hex() for value in moved.tolist()] == RADIAL_ROUND


def test_reducers_cannot_merge_so() -> None:
    with pytest.raises(ValueError, match="reducers see parts"):
        OuterSpec(merge="radial", exchange="reduced")


RADIAL_ROUND = [
    "96748e40",
    "72b11740",
    "92f3d83f",
    "4984af3f",
    "0515983f",
    "c1a5893f",
    "125b803f",
    "7c8e743f",
]
