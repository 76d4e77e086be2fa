"""Residuals follow the chunks of a stage when a member gets other parts."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec.payload import encode
from protocol.math.topk import sparsify
from protocol.reduction.partition import PartRange
from protocol.reduction.parts import Reducer, ReductionLayout, cut_payload, join_parts
from protocol.reduction.stage_reducers import StageReducers
from protocol.spec.outer import OuterSpec

LAYOUT = ReductionLayout(
    {"emb": (9, 11), "norm": (5,), "wq": (16, 8)},
    OuterSpec(exchange="reduced", chunk=16, top_k=4, reduced_top_k=1),
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


def whole(parts: list[PartRange], reduced: list[bytes]) -> bytes:
    """A result with these parts; others have reduced the rest."""
    stops = sorted({0, CHUNKS, *(end for part in parts for end in (part.first_chunk, part.last_chunk))})
    ranges = [PartRange(*ends) for ends in pairwise(stops)]
    own = dict(zip(parts, reduced, strict=True))
    sent = cut_payload(LAYOUT, payload(9), ranges)
    others = [
        own.get(part) or Reducer(LAYOUT, part).reduce([data], [1.0])
        for part, data in zip(ranges, sent, strict=True)
    ]
    return join_parts(LAYOUT, others, ranges)


def reduce(reducers: StageReducers, parts: list[PartRange]) -> list[bytes]:
    cut = zip(*(cut_payload(LAYOUT, payload(seed), parts) for seed in range(3)), strict=True)
    pairs = zip(reducers.for_parts(parts), cut, strict=True)
    return [each.reduce(sent, [1.0] * 3) for each, sent in pairs]


def by_chunk(reducers: StageReducers, parts: list[PartRange]) -> dict[int, torch.Tensor]:
    found = {}
    for each in reducers.for_parts(parts):
        residual, start = each.residual, 0
        for chunk in range(each.part.first_chunk, each.part.last_chunk):
            numel = sum(piece.numel for piece in LAYOUT.pieces(PartRange(chunk, chunk + 1)))
            found[chunk], start = residual[start : start + numel], start + numel
    return found


@given(PARTS, PARTS)
def test_other_parts_take_over_what_stays_and_the_rest_is_counted(
    before: list[PartRange], after: list[PartRange]
) -> None:
    reducers = StageReducers(LAYOUT)
    reducers.commit(1, whole(before, reduce(reducers, before)))
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
    reducers.commit(1, whole(parts, first))
    assert reducers.residual_norm > 0
    assert reduce(reducers, parts) != first
    assert reducers.lost_norm == 0


def test_a_member_without_parts_loses_its_residuals() -> None:
    reducers = StageReducers(LAYOUT)
    parts = [PartRange(0, CHUNKS)]
    reducers.commit(1, whole(parts, reduce(reducers, parts)))
    norm = reducers.residual_norm
    assert reducers.for_parts([]) == []
    assert reducers.residual_norm == 0
    assert math.isclose(reducers.lost_norm, norm)


def test_residuals_are_lost_where_others_have_reduced_the_committed_result() -> None:
    parts, reducers = [PartRange(0, 4), PartRange(4, CHUNKS)], StageReducers(LAYOUT)
    first, second = reduce(reducers, parts)
    other = Reducer(LAYOUT, parts[1]).reduce(cut_payload(LAYOUT, payload(9), parts[1:]), [1.0])
    assert other != second
    reducers.commit(1, join_parts(LAYOUT, [first, other], parts))
    assert reducers.residual_norm == reducers.since == 0
    reducers.commit(2, join_parts(LAYOUT, reduce(reducers, parts), parts))
    assert reducers.since == 2
    reducers.commit(3, join_parts(LAYOUT, [first, second], parts))
    assert reducers.residual_norm == reducers.since == 0


def test_a_checker_follows_its_reducer_through_aborts_and_other_parts() -> None:
    reducer, checker = StageReducers(LAYOUT), StageReducers(LAYOUT)
    for round_number, stop in enumerate((4, 4, 6, 6, 3), start=1):
        ranges = [PartRange(0, stop), PartRange(stop, CHUNKS)]
        sent = [cut_payload(LAYOUT, payload(10 * round_number + seed), ranges) for seed in range(3)]
        [own], [theirs] = (each.for_parts(ranges[:1], "partner") for each in (reducer, checker))
        parts = [each[0] for each in sent]
        answer = own.reduce(parts, [1.0, 2.0, 3.0])
        assert theirs.check(parts, [1.0, 2.0, 3.0], answer)
        if round_number == 2:
            reducer.abort()
            checker.abort()
            continue
        rest = Reducer(LAYOUT, ranges[1]).reduce([each[1] for each in sent], [1.0] * 3)
        for each in (reducer, checker):
            each.commit(round_number, join_parts(LAYOUT, [answer, rest], ranges))
        assert reducer.since == checker.since == 1
        assert math.isclose(reducer.residual_norm, checker.residual_norm, rel_tol=1e-6)
    assert reducer.residual_norm > 0
    norm = checker.residual_norm
    checker.for_parts([PartRange(0, 3)], "another partner")
    assert checker.residual_norm == checker.since == 0
    assert checker.lost_norm >= norm


def test_a_false_sum_and_a_sum_of_others_do_not_pass() -> None:
    part, weights = PartRange(0, CHUNKS), [1.0, 1.0]
    honest = [payload(1), payload(2)]
    parts = [cut_payload(LAYOUT, each, [part])[0] for each in honest]
    false = cut_payload(LAYOUT, payload(3), [part])[0]
    checker = Reducer(LAYOUT, part)
    assert checker.check(parts, weights, Reducer(LAYOUT, part).reduce(parts, weights))
    for answer in (
        Reducer(LAYOUT, part).reduce([parts[0], false], weights),
        Reducer(LAYOUT, part).reduce(parts, [1.0, 2.0]),
        Reducer(LAYOUT, part).reduce(parts[:1], [1.0]),
        b"",
        bytes(len(parts[0])),
    ):
        assert not checker.check(parts, weights, answer)
        assert checker.pending_result is None
