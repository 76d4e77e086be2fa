"""Payloads: what is encoded comes back, their size is known, and no bytes can do harm."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.core.model.shapes import parameter_shapes
from protocol.codec.payload import decode, encode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.payload_layout import PayloadLayout, TensorLayout
from protocol.math.topk import SparseTensor, sparsify
from protocol.run_files.resolve import resolve
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import INDEX_CODES, PAYLOAD_QUANTIZERS
from protocol.types import PayloadDescriptor, PeerId
from protocol.wire.convert.payloads import descriptor_to_pb

OUTERS = st.builds(
    OuterSpec,
    chunk=st.sampled_from([16, 64]),
    top_k=st.integers(0, 16),
    indices=st.sampled_from(list(INDEX_CODES)),
    quantizer=st.sampled_from(list(PAYLOAD_QUANTIZERS)),
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
        PayloadLayout(mine.shapes, OuterSpec(chunk=32, top_k=2)),
    ):
        with pytest.raises(HetnodeError, match="header" if other.nbytes == mine.nbytes else "bytes"):
            decode(other, data)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1.0, -0.0])
@pytest.mark.parametrize("options", [{}, {"quantizer": "1bit"}], ids=str)
def test_magnitudes_that_are_not_finite_and_positive_are_refused(
    poison: float, options: dict[str, Any]
) -> None:
    layout = PayloadLayout({"0.wq": (64, 64)}, OuterSpec(**options))
    sparse = some_content(layout, 0)["0.wq"]
    assert sparse.magnitudes is not None
    sparse.magnitudes[0] = poison
    poisoned = sparse
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


ENTROPY = (math.log2(math.comb(4096, 32)) + 2 * 32) / 8
"""Bytes that 32 of 4096 indices and as many codes of 2 bits need at least."""
BYTES_PER_CHUNK = [
    ({}, 44.0),
    ({"indices": "enumerative"}, 33.375 + 8),
    ({"quantizer": "1bit"}, 36 + 4.0),
    ({"indices": "enumerative", "quantizer": "1bit"}, 33.375 + 4),
    ({"quantizer": "none"}, 36 + 128.0),
    ({"top_k": 0}, 4.0 * 4096),
]


def bytes_per_chunk(options: dict[str, Any]) -> float:
    return next(nbytes for known, nbytes in BYTES_PER_CHUNK if known == options)


def layout_of(shapes: dict[str, tuple[int, ...]], options: dict[str, Any]) -> PayloadLayout:
    return PayloadLayout(shapes, OuterSpec(**options))


@pytest.mark.parametrize(("options", "nbytes"), BYTES_PER_CHUNK, ids=str)
def test_the_bytes_per_chunk_of_each_codec(options: dict[str, Any], nbytes: float) -> None:
    layout, less = (layout_of({"head": (chunks, 4096)}, options) for chunks in (1008, 1000))
    assert (layout.nbytes - less.nbytes) / 8 == nbytes
    magnitudes = {"2bit": 8, "1bit": 4, "none": 0}[layout.outer.value_quantizer]
    assert layout.nbytes == 1008 * nbytes + 16 + magnitudes, "behind the header and the magnitudes"


def test_the_enumerative_codec_is_within_a_third_of_a_percent_of_the_entropy() -> None:
    assert 41.26 < ENTROPY < 41.28
    assert bytes_per_chunk({"indices": "enumerative"}) < min(42.2, 1.003 * ENTROPY)


@pytest.mark.parametrize(
    ("preset", "codec", "nbytes"),
    [
        ("tiny", "ef2bit-v1:4096/128", 15_465),
        ("178m", "en2bit-v1:4096/32", 251_764),
        ("512m", "en2bit-v1:4096/32", 831_469),
        ("1b", "en2bit-v1:4096/32", 2_712_024),
        ("70b", "en2bit-v1:4096/32", 172_866_216),
    ],
)
def test_the_presets_of_the_paper_send_enumerative_indices(preset: str, codec: str, nbytes: int) -> None:
    spec = resolve(preset)
    layout = PayloadLayout(parameter_shapes(spec, 1), spec.outer)
    assert (layout.codec, layout.nbytes) == (codec, nbytes)
    assert spec.outer.indices == ("elias-fano" if preset == "tiny" else "enumerative")


@pytest.mark.parametrize(
    ("indices", "usual"), [("elias-fano", {}), ("enumerative", {"indices": "enumerative"})]
)
def test_all_that_is_not_chunks_is_below_one_percent_of_a_stage_of_ten_million(
    indices: str, usual: dict[str, Any]
) -> None:
    """Header, magnitudes, short last chunks, and the signed descriptor that travels with the payload."""
    spec = resolve("178m", overrides={"swarm.stages": 9, "outer.indices": indices})
    shapes = parameter_shapes(spec, 4)
    parameters = sum(map(math.prod, shapes.values()))
    assert 10e6 < parameters < 15e6
    layout = PayloadLayout(shapes, spec.outer)
    owner = PeerId("12D3KooW" + 44 * "x")
    descriptor = PayloadDescriptor(
        spec.name, 4, 10**6, owner, 64 * "a", layout.codec, 1.0, layout.nbytes, 64 * "b", bytes(64)
    )
    envelope = len(descriptor_to_pb(descriptor).SerializeToString())
    assert (layout.nbytes + envelope) / (parameters / 4096 * bytes_per_chunk(usual)) < 1.01


@pytest.mark.parametrize("options", [options for options, _ in BYTES_PER_CHUNK], ids=str)
def test_the_form_of_every_codec_is_this(options: dict[str, Any]) -> None:
    """A member that reads or writes another form belongs to another version."""
    layout = layout_of({"0.wq": (3, 4096), "norm_f": (129,)}, options)
    content = {name: plain_content(tensor) for name, tensor in layout.tensors.items()}
    data = encode(layout, content)
    assert_same(content, decode(layout, data))
    assert hashlib.sha256(data).hexdigest()[:16] == FORMS[layout.codec]


def plain_content(layout: TensorLayout) -> SparseTensor:
    """Content that no floating-point operation has touched."""
    indices = None if layout.outer.dense else even_indices(layout)
    numbers = torch.arange(layout.sent)
    if layout.outer.value_quantizer == "none":
        return SparseTensor(indices, numbers / 8)
    magnitudes = torch.tensor([0.75, 1.5])[: {"2bit": 2, "1bit": 1}[layout.outer.value_quantizer]]
    codes = (numbers % (2 * len(magnitudes))).to(torch.uint8)
    return SparseTensor(indices, codes, magnitudes)


def even_indices(layout: TensorLayout) -> Tensor:
    indices = [
        block.start + chunk * block.chunks.size + i * (block.chunks.size // block.chunks.k)
        for block in layout.blocks()
        for chunk in range(block.chunks.count)
        for i in range(block.chunks.k)
    ]
    return torch.tensor(indices)


FORMS = {
    "ef2bit-v1:4096/32": "1d8e37fd14dc86fb",
    "en2bit-v1:4096/32": "cd8bfb495b207d36",
    "ef1bit-v1:4096/32": "6d65231fff05ac9a",
    "en1bit-v1:4096/32": "cca800a8e745a994",
    "ef32-v1:4096/32": "cd36c09bc84616b4",
    "dense32-v1": "6b776d96ad4971b6",
}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "ef2bit-v1:4096/32"),
        ({"quantizer": "none"}, "ef32-v1:4096/32"),
        ({"indices": "enumerative", "quantizer": "1bit"}, "en1bit-v1:4096/32"),
        ({"indices": "enumerative", "top_k": 0}, "dense32-v1"),
        ({"top_k": 0, "chunk": 64}, "dense32-v1"),
    ],
    ids=str,
)
def test_codecs_are_named_with_their_parameters(options: dict[str, Any], name: str) -> None:
    assert layout_of({}, options).codec == name


def test_unused_bits_of_the_codes_must_be_zero() -> None:
    layout = PayloadLayout({"norm_f": (5,)}, OuterSpec(chunk=16, top_k=16))
    data = encode(layout, some_content(layout, 0))
    with pytest.raises(HetnodeError, match="unused bits"):
        decode(layout, data[:-1] + bytes([data[-1] | 0x80]))
