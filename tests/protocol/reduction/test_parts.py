"""Reduction in parts: it equals gathering where nothing is left out, and no bytes can do harm."""

from __future__ import annotations

import contextlib
import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec.payload import decode, encode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_step import apply_update
from protocol.math.topk import sparsify
from protocol.reduction.partition import PartRange, partition
from protocol.reduction.parts import (
    Reducer,
    ReductionLayout,
    cut_payload,
    decode_part,
    decode_result,
    join_parts,
    ranges_of,
)
from protocol.spec.fixed import PLAIN_CLIP
from protocol.spec.outer import OuterSpec

SHAPES = {"emb": (9, 11), "norm": (5,), "wq": (16, 8)}
OUTERS = st.builds(
    OuterSpec,
    exchange=st.just("reduced"),
    chunk=st.just(16),
    top_k=st.sampled_from([0, 1, 4]),
    reduced_top_k=st.sampled_from([None, 0, 2, 16]),
    indices=st.sampled_from(["elias-fano", "enumerative"]),
    quantizer=st.sampled_from(["none", "1bit", "2bit"]),
)
FRACTIONS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5]), min_size=1, max_size=5).filter(any)
EXACT = OuterSpec(clip=PLAIN_CLIP, exchange="reduced", chunk=16, top_k=0, quantizer="none")


def payloads_of(layout: ReductionLayout, count: int, seed: int) -> list[bytes]:
    generator = torch.Generator().manual_seed(seed)
    return [
        encode(
            layout.payload,
            {
                name: sparsify(torch.randn(tensor.shape, generator=generator), tensor)
                for name, tensor in layout.payload.tensors.items()
            },
        )
        for _ in range(count)
    ]


def dense_of(layout: ReductionLayout, payload: bytes) -> np.ndarray:
    """All values of a payload in canonical order, float64."""
    found = []
    for name, sparse in decode(layout.payload, payload).items():
        flat = torch.zeros(math.prod(SHAPES[name]))
        sparse.add_to(flat, 1.0)
        found.append(flat.double().numpy())
    return np.concatenate(found)


def result_of(layout: ReductionLayout, result: bytes) -> np.ndarray:
    found = []
    for name, reduced in decode_result(layout, result).items():
        flat = torch.zeros(math.prod(SHAPES[name]))
        reduced.add_to(flat, 1.0)
        found.append(flat.double().numpy())
    return np.concatenate(found)


def run_round(
    layout: ReductionLayout, reducers: list[Reducer], payloads: list[bytes], weights: list[float]
) -> bytes:
    ranges = [reducer.part for reducer in reducers]
    cut = [cut_payload(layout, payload, ranges) for payload in payloads]
    parts = [
        reducer.reduce(sent, weights) for reducer, sent in zip(reducers, zip(*cut, strict=True), strict=True)
    ]
    return join_parts(layout, parts, ranges)


@given(st.integers(0, 100), FRACTIONS)
def test_parts_cover_all_chunks_in_order(chunks: int, fractions: list[float]) -> None:
    ranges = partition(chunks, fractions)
    assert len(ranges) == len(fractions)
    assert [chunk for part in ranges for chunk in range(part.first_chunk, part.last_chunk)] == [
        *range(chunks)
    ]
    for part, fraction in zip(ranges, fractions, strict=True):
        assert abs(len(part) - chunks * fraction / sum(fractions)) <= 1
        assert fraction or not len(part)


@pytest.mark.parametrize("fractions", [[], [0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_a_partition_needs_proper_fractions(fractions: list[float]) -> None:
    with pytest.raises(ValueError, match="finite fractions"):
        partition(10, fractions)


@given(OUTERS, FRACTIONS, st.integers(0, 2**32))
def test_cut_parts_hold_exactly_the_payload(outer: OuterSpec, fractions: list[float], seed: int) -> None:
    layout = ReductionLayout(SHAPES, outer)
    (payload,) = payloads_of(layout, 1, seed)
    ranges = partition(layout.chunks.total, fractions)
    values = []
    for part, data in zip(ranges, cut_payload(layout, payload, ranges), strict=True):
        if not len(part):
            assert data == b""
            continue
        assert len(data) == layout.part_sent(part).nbytes
        for piece, sparse in zip(layout.pieces(part), decode_part(layout, part, data).values(), strict=True):
            flat = torch.zeros(piece.numel)
            sparse.add_to(flat, 1.0)
            values.append(flat.double().numpy())
    assert np.array_equal(np.concatenate(values), dense_of(layout, payload))


@given(FRACTIONS, st.integers(1, 5), st.integers(0, 2**32))
def test_a_reduction_that_leaves_nothing_out_equals_gathering(
    fractions: list[float], members: int, seed: int
) -> None:
    layout = ReductionLayout(SHAPES, EXACT)
    payloads, weights = payloads_of(layout, members, seed), [1.0 + each for each in range(members)]
    reducers = [Reducer(layout, part) for part in partition(layout.chunks.total, fractions)]
    result = run_round(layout, reducers, payloads, weights)
    anchor = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    gathered = apply_update(
        anchor, [decode(layout.payload, each) for each in payloads], weights, OuterSpec(clip=PLAIN_CLIP)
    )
    reduced = apply_update(anchor, [decode_result(layout, result)], [1.0], OuterSpec(clip=PLAIN_CLIP))
    for name, tensor in gathered.items():
        assert torch.equal(tensor, reduced[name])


@given(OUTERS, FRACTIONS, st.integers(0, 2**32))
def test_what_results_leave_out_comes_later(outer: OuterSpec, fractions: list[float], seed: int) -> None:
    """Against numpy: residual' = beta residual + weighted mean - sent, over three rounds."""
    layout = ReductionLayout(SHAPES, outer)
    reducers = [Reducer(layout, part) for part in partition(layout.chunks.total, fractions)]
    weights, residual = [1.0, 3.0], np.zeros(sum(math.prod(shape) for shape in SHAPES.values()))
    for number in range(3):
        payloads = payloads_of(layout, 2, seed + number)
        result = run_round(layout, reducers, payloads, weights)
        means = [weight * dense_of(layout, each) for weight, each in zip(weights, payloads, strict=True)]
        residual = outer.error_decay * residual + sum(means) / sum(weights) - result_of(layout, result)
        for reducer in reducers:
            reducer.commit()
        held = np.concatenate([reducer.residual.numpy() for reducer in reducers])
        assert np.allclose(held, residual, atol=1e-5)


def test_an_aborted_round_keeps_the_residual() -> None:
    layout = ReductionLayout(SHAPES, OuterSpec(exchange="reduced", chunk=16, top_k=2))
    reducer = Reducer(layout, PartRange(0, layout.chunks.total))
    payloads = payloads_of(layout, 2, 0)
    first = run_round(layout, [reducer], payloads, [1.0, 1.0])
    assert run_round(layout, [reducer], payloads, [1.0, 1.0]) == first
    reducer.abort()
    assert reducer.residual_norm == 0
    assert run_round(layout, [reducer], payloads, [1.0, 1.0]) == first
    reducer.commit()
    assert reducer.residual_norm > 0
    assert run_round(layout, [reducer], payloads, [1.0, 1.0]) != first


def test_a_reducer_continues_from_its_residual() -> None:
    layout = ReductionLayout(SHAPES, OuterSpec(exchange="reduced", chunk=16, top_k=2))
    reducer, other = Reducer(layout, PartRange(2, 16)), Reducer(layout, PartRange(2, 16))
    parts = [cut_payload(layout, each, [reducer.part])[0] for each in payloads_of(layout, 3, 0)]
    reducer.reduce(parts, [1.0] * 3)
    reducer.commit()
    other.residual = reducer.residual
    parts = [cut_payload(layout, each, [other.part])[0] for each in payloads_of(layout, 3, 1)]
    assert other.reduce(parts, [1.0] * 3) == reducer.reduce(parts, [1.0] * 3)
    with pytest.raises(ValueError, match="residual"):
        other.residual = reducer.residual[1:]


def test_a_reducer_clips_by_the_parts_it_sees() -> None:
    layout = ReductionLayout(SHAPES, EXACT)
    part = PartRange(0, 16)
    usual = [dict.fromkeys(SHAPES, each) for each in (1.0, 1.0, 1000.0)]
    payloads = [
        encode(
            layout.payload,
            {
                name: sparsify(torch.full(SHAPES[name], value), layout.payload.tensors[name])
                for name, value in each.items()
            },
        )
        for each in usual
    ]
    result = run_round(layout, [Reducer(layout, part)], payloads, [1.0] * 3)
    assert np.allclose(result_of(layout, result), (1 + 1 + 8) / 3)


@given(OUTERS, FRACTIONS, st.integers(0, 2**32))
def test_a_result_has_one_form(outer: OuterSpec, fractions: list[float], seed: int) -> None:
    layout = ReductionLayout(SHAPES, outer)
    reducers = [Reducer(layout, part) for part in partition(layout.chunks.total, fractions)]
    result = run_round(layout, reducers, payloads_of(layout, 2, seed), [1.0, 1.0])
    assert len(result) == layout.result_nbytes([reducer.part for reducer in reducers])
    ranges = ranges_of(layout, result)
    assert ranges == [reducer.part for reducer in reducers if len(reducer.part)]
    start, parts = len(result) - sum(layout.part_reduced(part).nbytes for part in ranges), []
    for part in ranges:
        nbytes = layout.part_reduced(part).nbytes
        parts.append(result[start : start + nbytes])
        start += nbytes
    assert join_parts(layout, parts, ranges) == result


DAMAGED = ReductionLayout(SHAPES, OuterSpec(exchange="reduced", chunk=16, top_k=2))


@cache
def whole_result() -> bytes:
    reducers = [Reducer(DAMAGED, part) for part in partition(16, [1, 2, 1])]
    return run_round(DAMAGED, reducers, payloads_of(DAMAGED, 2, 0), [1.0, 1.0])


@given(st.data())
def test_damaged_results_are_refused_or_another_result(data: st.DataObject) -> None:
    whole = bytearray(whole_result())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    result = bytes(whole[: data.draw(st.sampled_from([len(whole), 3, 20, 30, len(whole) - 1]))])
    with contextlib.suppress(HetnodeError):
        decode_result(DAMAGED, result)


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_any_bytes_are_refused(tail: bytes, count: int) -> None:
    layout = ReductionLayout(SHAPES, EXACT)
    header = run_round(layout, [Reducer(layout, PartRange(0, 16))], payloads_of(layout, 1, 0), [1.0])[:16]
    for data in (tail, header + count.to_bytes(4, "little") + tail):
        with pytest.raises(HetnodeError) as caught:
            decode_result(layout, data)
        assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT


def test_parts_of_other_ranges_are_refused() -> None:
    layout = ReductionLayout({"a": (64,)}, OuterSpec(exchange="reduced", chunk=16, top_k=2))
    left, right = PartRange(0, 2), PartRange(2, 4)
    parts = cut_payload(
        layout,
        encode(layout.payload, {"a": sparsify(torch.arange(64.0), layout.payload.tensors["a"])}),
        [left, right],
    )
    with pytest.raises(HetnodeError, match="header"):
        Reducer(layout, left).reduce([parts[1]], [1.0])
    results = [
        Reducer(layout, each).reduce([data], [1.0]) for each, data in zip((left, right), parts, strict=True)
    ]
    with pytest.raises(HetnodeError, match="Part 0"):
        join_parts(layout, results[::-1], [left, right])
    for ranges in itertools.permutations([PartRange(0, 1), right]):
        with pytest.raises(ValueError, match="cover"):
            join_parts(layout, results, ranges)


def test_a_sum_that_overflows_is_refused() -> None:
    layout = ReductionLayout({"a": (16,)}, EXACT)
    huge = encode(layout.payload, {"a": sparsify(torch.full((16,), 3e38), layout.payload.tensors["a"])})
    reducer = Reducer(layout, PartRange(0, 1))
    (huge,) = cut_payload(layout, huge, [reducer.part])
    with pytest.raises(HetnodeError, match="not finite"):
        reducer.reduce([huge, huge], [1.0, 1.0])
    with pytest.raises(ValueError, match="weights"):
        reducer.reduce([huge], [0.0])
