"""Payloads: what is encoded comes back, their size is known, and no bytes can do harm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import OuterSpec
from protocol.tensorpack import EliasFano, PayloadLayout, decode, encode
from protocol.topk import SparseTensor, sparsify

OUTERS = st.builds(
    OuterSpec,
    chunk=st.sampled_from([16, 64]),
    top_k=st.integers(0, 16),
    layout=st.sampled_from(["flat", "tiles"]),
    short_chunk=st.sampled_from(["proportional", "clip"]),
    quantizer=st.sampled_from(["2bit", "none"]),
)
SHAPES = st.dictionaries(
    st.sampled_from(["emb", "0.wq", "0.norm1", "head"]),
    st.one_of(st.tuples(st.integers(1, 70)), st.tuples(st.integers(1, 12), st.integers(1, 12))),
    min_size=1,
)
LAYOUTS = st.builds(PayloadLayout, SHAPES, OUTERS)


def some_content(layout: PayloadLayout, seed: int) -> dict[str, SparseTensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: sparsify(torch.randn(tensor.shape, generator=generator), tensor)
        for name, tensor in layout.tensors.items()
    }


def assert_same(left: dict[str, SparseTensor], right: dict[str, SparseTensor]) -> None:
    assert list(left) == list(right)
    for name, sparse in left.items():
        for attribute in ("indices_s", "codes_s", "magnitudes"):
            mine, theirs = getattr(sparse, attribute), getattr(right[name], attribute)
            assert (mine is None) == (theirs is None)
            assert mine is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


@given(LAYOUTS, st.integers(0, 2**32))
def test_a_decoded_payload_is_what_was_encoded(layout: PayloadLayout, seed: int) -> None:
    content = some_content(layout, seed)
    data = encode(layout, content)
    assert len(data) == layout.nbytes
    assert_same(content, decode(layout, data))


@given(LAYOUTS, st.integers(0, 2**32), st.data())
def test_damaged_payloads_are_refused_or_decode_to_something_harmless(
    layout: PayloadLayout, seed: int, data
) -> None:
    damaged = bytearray(encode(layout, some_content(layout, seed)))
    flips = data.draw(st.lists(st.integers(0, 8 * len(damaged) - 1), min_size=1, max_size=4, unique=True))
    for bit in flips:
        damaged[bit // 8] ^= 1 << bit % 8
    _assert_refused_or_harmless(layout, bytes(damaged))


@given(LAYOUTS, st.data())
def test_any_bytes_behind_a_good_header_are_refused_or_harmless(layout: PayloadLayout, data) -> None:
    size = layout.nbytes - len(layout.header)
    _assert_refused_or_harmless(layout, layout.header + data.draw(st.binary(min_size=size, max_size=size)))


@given(LAYOUTS, st.binary(max_size=400))
def test_any_other_bytes_are_refused(layout: PayloadLayout, data: bytes) -> None:
    with pytest.raises(HetnodeError) as caught:
        decode(layout, data)
    assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT


def _assert_refused_or_harmless(layout: PayloadLayout, data: bytes) -> None:
    try:
        content = decode(layout, data)
    except HetnodeError as error:
        if error.code is not ErrorCode.PAYLOAD_CORRUPT:
            raise
        return
    for name, sparse in content.items():
        tensor = layout.tensors[name]
        assert torch.isfinite(sparse.values_s).all()
        assert len(sparse.values_s) == tensor.sent
        sparse.add_to(torch.zeros(tensor.numel), 1.0)
        if sparse.indices_s is not None:
            assert len(sparse.indices_s.unique()) == tensor.sent
    assert encode(layout, content) == data, "there is one valid form for every content"


def test_a_payload_for_other_shapes_or_another_codec_is_refused() -> None:
    mine = PayloadLayout({"0.wq": (16, 16)}, OuterSpec(chunk=64, top_k=4))
    data = encode(mine, some_content(mine, 0))
    for other in (
        PayloadLayout({"0.wk": (16, 16)}, mine.outer),
        PayloadLayout({"0.wq": (8, 32)}, mine.outer),
        PayloadLayout(mine.shapes, OuterSpec(chunk=64, top_k=4, layout="tiles")),
    ):
        assert other.nbytes == mine.nbytes, "or the length alone would have told"
        with pytest.raises(HetnodeError, match="header"):
            decode(other, data)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1.0])
def test_magnitudes_that_are_not_finite_and_positive_are_refused(poison: float) -> None:
    layout = PayloadLayout({"0.wq": (64, 64)}, OuterSpec())
    content = some_content(layout, 0)
    sparse = content["0.wq"]
    poisoned = SparseTensor(sparse.indices_s, sparse.codes_s, torch.tensor([poison, 1.0]))
    with pytest.raises(HetnodeError) as caught:
        decode(layout, encode(layout, {"0.wq": poisoned}))
    assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT


@pytest.mark.parametrize("outer", [OuterSpec(top_k=0), OuterSpec(quantizer="none")])
def test_values_that_are_not_finite_are_refused(outer: OuterSpec) -> None:
    layout = PayloadLayout({"0.wq": (64, 64)}, outer)
    sparse = some_content(layout, 0)["0.wq"]
    sparse.codes_s[3] = math.nan
    with pytest.raises(HetnodeError) as caught:
        decode(layout, encode(layout, {"0.wq": sparse}))
    assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT


def test_the_default_codec_takes_44_bytes_per_chunk() -> None:
    def nbytes(chunks: int) -> int:
        return PayloadLayout({"head": (chunks, 4096)}, OuterSpec()).nbytes

    assert EliasFano(4096, 32).nbytes == 36
    assert nbytes(1000) - nbytes(999) == 44
    header_and_magnitudes = 16 + 8
    assert nbytes(1) == 44 + header_and_magnitudes


def test_codecs_are_named_with_their_parameters() -> None:
    def codec(**outer) -> str:
        return PayloadLayout({}, OuterSpec(**outer)).codec

    assert codec() == "ef2bit-v1:4096/32"
    assert codec(quantizer="none", layout="tiles", short_chunk="clip") == "ef32-v1:4096/32/tiles/clip"
    assert codec(top_k=0) == "dense32-v1"


@given(st.integers(1, 300), st.data())
def test_elias_fano_codes_any_increasing_indices(size: int, data) -> None:
    k = data.draw(st.integers(1, size))
    code = EliasFano(size, k)
    rows = data.draw(
        st.lists(st.permutations(range(size)).map(lambda order: sorted(order[:k])), min_size=1, max_size=3)
    )
    indices = np.array(rows)
    coded = code.encode(indices)
    assert coded.shape == (len(rows), code.nbytes)
    assert np.array_equal(code.decode(coded), indices)


def test_elias_fano_has_the_documented_form() -> None:
    code = EliasFano(16, 3)
    assert code.low_bits == 2
    # Low bits 01 01 00, lowest first, then ones at high_i + i = 0, 2, 5 of six bits.
    assert code.encode(np.array([[1, 5, 12]])).tolist() == [[0b01_000101, 0b1001]]


@pytest.mark.parametrize(
    ("indices", "reason"), [([1, 5, 13], "exceed"), ([1, 5, 5], "increasing"), ([5, 4, 9], "increasing")]
)
def test_indices_out_of_range_or_out_of_order_are_refused(indices: list[int], reason: str) -> None:
    code = EliasFano(13, 3)
    with pytest.raises(ValueError, match=reason):
        code.decode(code.encode(np.array([[0, 1, 2], indices])))


def test_unused_bits_of_the_codes_must_be_zero() -> None:
    layout = PayloadLayout({"norm_f": (5,)}, OuterSpec(chunk=16, top_k=16, short_chunk="clip"))
    data = encode(layout, some_content(layout, 0))
    with pytest.raises(HetnodeError, match="unused bits"):
        decode(layout, data[:-1] + bytes([data[-1] | 0x80]))


@pytest.mark.parametrize(("size", "k"), [(4096, 32), (4096, 128), (4096, 1), (65536, 512)])
def test_elias_fano_stays_near_the_entropy(size: int, k: int) -> None:
    entropy_bits = math.log2(math.comb(size, k))
    assert EliasFano(size, k).nbytes * 8 <= 1.1 * entropy_bits + 8
