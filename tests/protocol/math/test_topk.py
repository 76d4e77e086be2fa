"""The cut into chunks, the choice of values and their quantization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.math import topk
from protocol.math.largest import top_k
from protocol.math.payload_layout import ChunkGroup, TensorLayout
from protocol.math.topk import sparsify
from protocol.spec.outer import OuterSpec

SHAPES = st.one_of(st.tuples(st.integers(1, 90)), st.tuples(st.integers(1, 24), st.integers(1, 24)))
OUTERS = st.builds(
    OuterSpec,
    chunk=st.just(16),
    top_k=st.integers(1, 16),
    quantizer=st.sampled_from(["2bit", "1bit", "none"]),
)


def integers_like(shape: tuple[int, ...], seed: int, spread: int) -> Tensor:
    """Small integers as floats: full of ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-spread, spread + 1, shape, generator=generator).float()


def by_stable_sort(chunks: Tensor, k: int) -> Tensor:
    return chunks.abs().sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values


def assert_top_k(chunks: Tensor, k: int) -> None:
    indices, values = top_k(chunks, k)
    assert np.array_equal(indices, by_stable_sort(chunks, k).numpy())
    assert np.array_equal(values, chunks.gather(1, torch.from_numpy(indices)).numpy())


@given(st.integers(1, 5), st.integers(1, 40), st.data())
def test_top_k_agrees_with_a_stable_sort_even_where_all_is_ties(count: int, size: int, data) -> None:
    k = data.draw(st.integers(1, size))
    assert_top_k(
        integers_like((count, size), data.draw(st.integers(0, 2**32)), data.draw(st.integers(0, 3))), k
    )


ROWS: dict[str, Any] = {
    "noise": torch.randn,
    "zeros": torch.zeros,
    "equal": lambda n: torch.full((n,), -2.5),
    "few that are not zero": lambda n: torch.zeros(n).index_fill(0, torch.arange(0, n, n // 7), 3.0),
    "large ones in one group": lambda n: torch.randn(n).index_fill(0, torch.arange(5, n, 128), 9.0),
    "large ones at the end": lambda n: torch.arange(n).float() ** 4,
    "half are ties": lambda n: torch.randn(n).clamp(-0.1, 0.1),
    "tiny": lambda n: torch.randn(n) * 1e-42,
    "huge": lambda n: torch.randn(n).sign() * 3e38,
}


@pytest.mark.parametrize("size", [4096, 4097, 300, 65536])
@pytest.mark.parametrize("k", [1, 32, 128])
def test_rows_of_every_kind_side_by_side_are_chosen_as_by_a_stable_sort(size: int, k: int) -> None:
    torch.manual_seed(0)
    assert_top_k(torch.stack([make(size) for make in ROWS.values()]), k)
    for make in ROWS.values():
        assert_top_k(torch.stack([make(size)] * 2), k)


@given(SHAPES, OUTERS, st.sampled_from([1, 16, 48, 1 << 19]))
def test_blocks_hold_every_element_once(shape: tuple[int, ...], outer: OuterSpec, block: int) -> None:
    layout = TensorLayout(shape, outer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "BLOCK", block)
        blocks = list(layout.blocks())
    bounds = [0, *(block.stop for block in blocks)]
    assert bounds == [*(block.start for block in blocks), layout.numel]
    cut = [(size, k) for group in layout.groups for size, k in [(group.size, group.k)] * group.count]
    assert cut == [(b.chunks.size, b.chunks.k) for b in blocks for _ in range(b.chunks.count)]
    assert layout.lengths_c.tolist() == [k for _, k in cut]


@given(SHAPES, OUTERS, st.integers(0, 2**32))
def test_what_is_sent_does_not_depend_on_the_blocks(
    shape: tuple[int, ...], outer: OuterSpec, seed: int
) -> None:
    layout, tensor = TensorLayout(shape, outer), integers_like(shape, seed, 5)
    whole = sparsify(tensor, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "BLOCK", 32)
        in_blocks = sparsify(tensor, layout)
        total = torch.zeros(tensor.numel())
        in_blocks.add_to(total, 0.7)
    assert torch.equal(whole.indices_s, in_blocks.indices_s)
    assert torch.equal(whole.values_s, in_blocks.values_s)
    assert torch.equal(total[whole.indices_s], whole.values_s * 0.7)


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


def test_the_layout_gives_the_short_last_chunk_its_share() -> None:
    proportional = TensorLayout((100, 100), OuterSpec(chunk=4096, top_k=32))
    assert proportional.groups == (ChunkGroup(2, 4096, 32), ChunkGroup(1, 1808, 14))


@pytest.mark.parametrize(("size", "k"), [(1, 1), (63, 1), (64, 1), (191, 1), (192, 2), (320, 3), (4096, 32)])
def test_proportional_k_rounds_half_up_and_never_to_nothing(size: int, k: int) -> None:
    (group,) = TensorLayout((size,), OuterSpec(chunk=4096, top_k=32)).groups
    assert group.k == k


def test_dense_sends_every_element_exactly() -> None:
    tensor = torch.randn(7, 9)
    sparse = sparsify(tensor, TensorLayout((7, 9), OuterSpec(top_k=0)))
    assert sparse.indices_s is None
    assert torch.equal(sparse.values_s, tensor.flatten())


def test_zeros_stay_zeros() -> None:
    for quantizer in ("2bit", "1bit", "none"):
        outer = OuterSpec(quantizer=quantizer)
        assert not sparsify(torch.zeros(64, 64), TensorLayout((64, 64), outer)).values_s.any()
