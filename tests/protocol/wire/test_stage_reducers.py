"""Residuals follow the chunks of a stage when a member gets other parts."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.algorithm.partition import PartRange
from protocol.algorithm.topk import sparsify
from protocol.spec.outer import OuterSpec
from protocol.wire.payload_codec import encode
from protocol.wire.reduction import ReductionLayout, cut_payload
from protocol.wire.stage_reducers import StageReducers

LAYOUT = ReductionLayout(
    {"emb": (9, 11), "norm": (5,), "wq": (16, 8)},
    OuterSpec(exchange="reduced", chunk=16, top_k=4, reduced_top_k=1, short_chunk="clip"),
)
CHUNKS = LAYOUT.chunks.total
PARTS = st.lists(st.integers(0, CHUNKS), min_size=2, max_size=5, unique=True).map(
    lambda stops: [PartRange(*ends) for ends in zip(sorted(stops), sorted(stops)[1:], strict=False)]
)


def payload(seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    tensors = LAYOUT.payload.tensors.items()
    return encode(
        LAYOUT.payload,
        {name: sparsify(torch.randn(tensor.shape, generator=generator), tensor) for name, tensor in tensors},
    )


def reduce(reducers: StageReducers, parts: list[PartRange]) -> list[bytes]:
    cut = zip(*(cut_payload(LAYOUT, payload(seed), parts) for seed in range(3)), strict=True)
    pairs = zip(reducers.for_parts(parts), cut, strict=True)
    return [each.reduce(sent, [1.0] * 3) for each, sent in pairs]


def by_chunk(reducers: StageReducers, parts: list[PartRange]) -> dict[int, torch.Tensor]:
    found = {}
    for each in reducers.for_parts(parts):
        residual, start = each.state_dict()["residual"], 0
        for chunk in range(each.part.first_chunk, each.part.last_chunk):
            numel = sum(piece.numel for piece in LAYOUT.pieces(PartRange(chunk, chunk + 1)))
            found[chunk], start = residual[start : start + numel], start + numel
    return found


@given(PARTS, PARTS)
def test_other_parts_take_over_what_stays_and_the_rest_is_counted(
    before: list[PartRange], after: list[PartRange]
) -> None:
    reducers = StageReducers(LAYOUT)
    reduce(reducers, before)
    reducers.commit()
    norm, held = reducers.residual_norm, by_chunk(reducers, before)
    assert norm > 0
    for chunk, residual in by_chunk(reducers, after).items():
        assert torch.equal(residual, held.get(chunk, torch.zeros_like(residual)))
    assert math.isclose(math.hypot(reducers.lost_norm, reducers.residual_norm), norm, rel_tol=1e-5)


def test_only_a_committed_round_changes_the_residuals() -> None:
    parts, reducers = [PartRange(0, 4), PartRange(4, CHUNKS)], StageReducers(LAYOUT)
    first = reduce(reducers, parts)
    reducers.abort()
    assert reducers.residual_norm == 0
    assert reduce(reducers, parts) == first
    reducers.commit()
    assert reducers.residual_norm > 0
    assert reduce(reducers, parts) != first
    assert reducers.lost_norm == 0


def test_a_member_without_parts_loses_its_residuals() -> None:
    reducers = StageReducers(LAYOUT)
    reduce(reducers, [PartRange(0, CHUNKS)])
    reducers.commit()
    norm = reducers.residual_norm
    assert reducers.for_parts([]) == []
    assert reducers.residual_norm == 0
    assert math.isclose(reducers.lost_norm, norm)
