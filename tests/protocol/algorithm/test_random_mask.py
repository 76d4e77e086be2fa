"""Random masks: the same positions on all machines, each of them as often as any other."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.algorithm.random_mask import RoundMask
from protocol.algorithm.topk import TensorLayout
from protocol.spec.outer import OuterSpec


def mask_of(
    round_number: int, size: int, k: int, count: int = 3, seed: int = 0, name: str = "0.wq"
) -> NDArray[np.int64]:
    mask = RoundMask(seed, round_number).of_tensor(name)
    return mask.positions(size, k, mask.rotations(count))


@given(st.integers(1, 10**7), st.integers(1, 300), st.data(), st.integers(0, 2**63 - 1))
def test_the_positions_of_a_chunk_ascend_and_are_its_own(
    round_number: int, size: int, data, seed: int
) -> None:
    k = data.draw(st.integers(1, size))
    positions_ck = mask_of(round_number, size, k, 5, seed)
    assert positions_ck.shape == (5, k)
    assert (np.diff(positions_ck, axis=1) > 0).all()
    assert (positions_ck >= 0).all()
    assert (positions_ck < size).all()


@pytest.mark.parametrize(("size", "k"), [(64, 4), (64, 7), (7, 5), (1, 1), (10, 10)])
def test_every_position_is_sent_once_in_a_cycle_and_few_twice(size: int, k: int) -> None:
    cycle = -(-size // k)
    for first in (1, cycle + 1, 7 * cycle + 1):
        sent = np.zeros((3, size), np.int64)
        for round_number in range(first, first + cycle):
            for chunk, positions_k in enumerate(mask_of(round_number, size, k)):
                sent[chunk, positions_k] += 1
        assert sent.min() == 1
        assert (sent.sum(axis=1) == cycle * k).all()
        assert sent.max() <= 2


def test_cycles_chunks_tensors_and_seeds_have_other_positions() -> None:
    masks = {
        mask_of(*case).tobytes()
        for case in (
            (1, 64, 4, 1),
            (2, 64, 4, 1),
            (17, 64, 4, 1),
            (1, 64, 4, 1, 1),
            (1, 64, 4, 1, 0, "0.wk"),
        )
    }
    assert len(masks) == 5
    assert len(np.unique(mask_of(1, 64, 4, 8), axis=0)) > 4


def test_each_position_is_as_likely_as_any_other() -> None:
    """Over 4,000 seeds, where 250 of 16 positions are expected: within five standard deviations."""
    counts = np.zeros(64, np.int64)
    for seed in range(4000):
        np.add.at(counts, mask_of(3, 64, 4, 1, seed).ravel(), 1)
    assert abs(counts - 250).max() < 5 * (250 * 15 / 16) ** 0.5


def test_the_positions_are_these() -> None:
    """A member with others belongs to another version: it would add values at wrong places."""
    assert mask_of(1, 16, 4, 3).tolist() == [[8, 11, 14, 15], [6, 9, 12, 13], [1, 2, 11, 14]]
    layout = TensorLayout(
        (300, 130),
        OuterSpec(top_k=576, selection="random", layout="tiles"),
        RoundMask(7, 12).of_tensor("head"),
    )
    data = layout.masked_indices.numpy().astype("<i8").tobytes()
    assert hashlib.sha256(data).hexdigest()[:16] == "ee45624ac32bab79"
