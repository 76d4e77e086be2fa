"""The cut into chunks, the choice of values and their quantization."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.spec import OuterSpec
from protocol.topk import ChunkGroup, TensorLayout, fit_magnitudes, sparsify, top_k

SHAPES = st.one_of(st.tuples(st.integers(1, 90)), st.tuples(st.integers(1, 24), st.integers(1, 24)))
OUTERS = st.builds(
    OuterSpec,
    chunk=st.just(16),
    top_k=st.integers(1, 16),
    layout=st.sampled_from(["flat", "tiles"]),
    short_chunk=st.sampled_from(["proportional", "clip"]),
    quantizer=st.sampled_from(["2bit", "none"]),
)


def integers_like(shape: tuple[int, ...], seed: int, spread: int) -> Tensor:
    """Small integers as floats: full of ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-spread, spread + 1, shape, generator=generator).float()


@given(st.integers(1, 5), st.integers(1, 40), st.data())
def test_top_k_agrees_with_a_stable_sort_even_where_all_is_ties(count: int, size: int, data) -> None:
    k = data.draw(st.integers(1, size))
    chunks = integers_like((count, size), data.draw(st.integers(0, 2**32)), data.draw(st.integers(0, 3)))
    expected = chunks.abs().sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    assert torch.equal(top_k(chunks, k), expected)


@given(SHAPES, OUTERS)
def test_chunks_hold_every_element_once_and_positions_name_it(
    shape: tuple[int, ...], outer: OuterSpec
) -> None:
    layout = TensorLayout(shape, outer)
    elements = torch.arange(math.prod(shape)).reshape(shape)
    in_chunk_order = torch.cat([chunk.flatten() for chunk in layout.chunks(elements)])
    assert torch.equal(in_chunk_order.sort().values, elements.flatten())
    positions = torch.arange(math.prod(shape))
    assert torch.equal(layout.row_major(positions), in_chunk_order)
    assert torch.equal(layout.positions(in_chunk_order), positions)
    assert [tuple(chunk.shape) for chunk in layout.chunks(elements)] == [
        (group.count, group.size) for group in layout.groups
    ]


@given(SHAPES, OUTERS, st.integers(0, 2**32))
def test_what_is_sent_are_distinct_elements_and_the_layout_knows_how_many(
    shape: tuple[int, ...], outer: OuterSpec, seed: int
) -> None:
    layout = TensorLayout(shape, outer)
    tensor = integers_like(shape, seed, 5)
    sparse = sparsify(tensor, layout)
    assert sparse.indices_s is not None
    assert len(sparse.indices_s) == len(sparse.indices_s.unique()) == len(sparse.values_s) == layout.sent
    if outer.quantizer == "none":
        assert torch.equal(sparse.values_s, tensor.flatten()[sparse.indices_s])


def test_flat_layout_gives_the_short_last_chunk_its_share() -> None:
    proportional = TensorLayout((100, 100), OuterSpec(chunk=4096, top_k=32))
    assert proportional.groups == (ChunkGroup(2, 4096, 32), ChunkGroup(1, 1808, 14))
    clipped = TensorLayout((100, 100), OuterSpec(chunk=4096, top_k=32, short_chunk="clip"))
    assert clipped.groups == (ChunkGroup(2, 4096, 32), ChunkGroup(1, 1808, 32))


@pytest.mark.parametrize(("size", "k"), [(1, 1), (63, 1), (64, 1), (191, 1), (192, 2), (320, 3), (4096, 32)])
def test_proportional_k_rounds_half_up_and_never_to_nothing(size: int, k: int) -> None:
    (group,) = TensorLayout((size,), OuterSpec(chunk=4096, top_k=32)).groups
    assert group.k == k


def test_tiles_take_the_largest_divisors_up_to_the_side() -> None:
    outer = OuterSpec(chunk=4096, top_k=32, layout="tiles")
    assert TensorLayout((256, 128), outer).groups == (ChunkGroup(8, 4096, 32),)
    # 352 = 8 * 44 and 96 = 2 * 48.
    assert TensorLayout((352, 96), outer).groups == (ChunkGroup(16, 44 * 48, 17),)
    assert TensorLayout((128,), outer).groups == (ChunkGroup(2, 64, 1),)


def test_dense_sends_every_element_exactly() -> None:
    tensor = torch.randn(7, 9)
    sparse = sparsify(tensor, TensorLayout((7, 9), OuterSpec(top_k=0)))
    assert sparse.indices_s is None
    assert torch.equal(sparse.values_s, tensor.flatten())


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9))
def test_fitted_magnitudes_are_the_best_of_all_ways_to_split_the_values_in_two(values: list[float]) -> None:
    low, high = fit_magnitudes(torch.tensor(values)).double()
    assert 0 <= low <= high
    absolute = torch.tensor(values, dtype=torch.float64).abs()
    fitted = torch.minimum((absolute - low) ** 2, (absolute - high) ** 2).sum()
    best = min(
        sum(((part - part.mean()) ** 2).sum() for part in (absolute[mask], absolute[~mask]) if len(part))
        for mask in map(torch.tensor, itertools.product([False, True], repeat=len(values)))
    )
    assert fitted <= best + 1e-9 * (1 + absolute.square().sum())


@given(SHAPES, OUTERS.filter(lambda outer: outer.quantizer == "2bit"), st.integers(0, 2**32))
def test_two_bits_keep_the_sign_and_take_the_nearer_magnitude(
    shape: tuple[int, ...], outer: OuterSpec, seed: int
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sparse = sparsify(tensor, TensorLayout(shape, outer))
    assert sparse.indices_s is not None
    assert sparse.magnitudes is not None
    original = tensor.flatten()[sparse.indices_s]
    assert torch.equal(sparse.values_s.sign(), original.sign())
    distance = (original.abs().unsqueeze(1) - sparse.magnitudes).abs()
    error = (sparse.values_s - original).abs()
    torch.testing.assert_close(error, distance.amin(dim=1), rtol=0, atol=1e-6)


def test_zeros_stay_zeros() -> None:
    sparse = sparsify(torch.zeros(64, 64), TensorLayout((64, 64), OuterSpec()))
    assert not sparse.values_s.any()
