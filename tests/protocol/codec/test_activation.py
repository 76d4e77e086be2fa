"""Tensors on a link: what is packed comes back, and no frame can do harm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec.activation import pack_activation, pack_ids, unpack_activation, unpack_ids
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.link import LinkSpec
from protocol.spec.quantizers import LINK_QUANTIZERS
from protocol.types import DType, TensorHeader

SHAPE = (2, 5, 8)
DTYPES = list(LINK_QUANTIZERS)


def some_activation() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
def test_bf16_comes_back_as_rounded(source: torch.dtype) -> None:
    x = some_activation().to(source)
    headers, data = pack_activation("x", x, "bf16")
    assert sum(header.nbytes for header in headers) == len(data)
    assert torch.equal(unpack_activation(headers, data, "x", SHAPE, "bf16"), x.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 6, 8])
def test_a_token_takes_as_many_bytes_as_the_spec_says(dtype: str, width: int) -> None:
    _, data = pack_activation("x", some_activation()[..., :width], dtype)
    assert len(data) == 10 * LinkSpec(dtype=dtype).token_bytes(width)[0]


def test_tensors_of_a_frame_are_found_by_name_in_any_order() -> None:
    x, ids = some_activation(), torch.arange(10).view(2, 5)
    packed_x, packed_ids = pack_activation("x", x, "bf16"), pack_ids("ids", ids, 300)
    for first, second in [(packed_x, packed_ids), (packed_ids, packed_x)]:
        headers, data = first[0] + second[0], first[1] + second[1]
        assert torch.equal(unpack_ids(headers, data, "ids", (2, 5), 300), ids)
        assert unpack_activation(headers, data, "x", SHAPE, "bf16").shape == SHAPE


@pytest.mark.parametrize("view", ["transposed", "slice"])
def test_views_are_packed_in_row_major_order(view: str) -> None:
    x = some_activation()
    x = x.transpose(0, 1) if view == "transposed" else x[:, 1:4]
    headers, data = pack_activation("x", x, "bf16")
    assert torch.equal(unpack_activation(headers, data, "x", tuple(x.shape), "bf16"), x.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_so_and_spoil_no_other(dtype: str, poison: float) -> None:
    """The gradient norm must see them: all members then skip the step, and no link is ended for it."""
    clean = some_activation()
    x = clean.clone()
    x[1, 3, 2] = poison
    got = unpack_activation(*pack_activation("x", x, dtype), "x", SHAPE, dtype)
    assert not torch.isfinite(got[1, 3]).all()
    others = torch.ones(SHAPE[:2], dtype=torch.bool)
    others[1, 3] = False
    assert torch.equal(
        got[others], unpack_activation(*pack_activation("x", clean, dtype), "x", SHAPE, dtype)[others]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_that_is_not_as_promised_is_refused(dtype: str) -> None:
    headers, data = pack_activation("x", some_activation(), dtype)
    assert_refused(headers, data[:-1], dtype=dtype)
    assert_refused(headers, data + b"\0", dtype=dtype)
    assert_refused((), b"", dtype=dtype)
    assert_refused(headers, data, dtype=dtype, name="y")
    assert_refused(headers, data, dtype=dtype, shape=(5, 2, 8))
    renamed = (TensorHeader("x", DType.U8, (len(data),)),)
    assert_refused(renamed, data, dtype=dtype)
    swapped = tuple(TensorHeader(h.name, h.dtype, h.shape[::-1]) for h in headers)
    assert_refused(swapped, data, dtype=dtype)
    cancelling = (TensorHeader("p", DType.U8, (-4,)), TensorHeader("q", DType.U8, (4,)), *headers)
    assert_refused(cancelling, data, dtype=dtype)


@given(st.sampled_from(DTYPES), st.data())
def test_any_bytes_of_the_right_length_give_a_tensor_of_the_right_shape(dtype: str, data) -> None:
    headers, packed = pack_activation("x", some_activation(), dtype)
    noise = data.draw(st.binary(min_size=len(packed), max_size=len(packed)))
    assert unpack_activation(headers, noise, "x", SHAPE, dtype).shape == SHAPE


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(2, DType.U8), (256, DType.U8), (257, DType.U16), (65536, DType.U16), (65537, DType.I32)],
)
def test_ids_travel_in_the_smallest_type_that_holds_the_vocabulary(vocabulary: int, dtype: DType) -> None:
    ids = torch.tensor([[0, vocabulary - 1]])
    headers, data = pack_ids("ids", ids, vocabulary)
    assert [header.dtype for header in headers] == [dtype]
    assert len(data) == 2 * dtype.itemsize
    assert torch.equal(unpack_ids(headers, data, "ids", (1, 2), vocabulary), ids)


@pytest.mark.parametrize(("vocabulary", "bad"), [(200, 200), (1000, 65535), (70000, 70000), (70000, -1)])
def test_ids_outside_the_vocabulary_are_refused(vocabulary: int, bad: int) -> None:
    headers, data = pack_ids("ids", torch.tensor([[1, bad]]), vocabulary)
    with pytest.raises(HetnodeError, match="vocabulary") as caught:
        unpack_ids(headers, data, "ids", (1, 2), vocabulary)
    assert caught.value.code is ErrorCode.FRAME_CORRUPT


def assert_refused(
    headers: tuple[TensorHeader, ...],
    data: bytes,
    *,
    dtype: str,
    name: str = "x",
    shape: tuple[int, ...] = SHAPE,
) -> None:
    with pytest.raises(HetnodeError) as caught:
        unpack_activation(headers, data, name, shape, dtype)
    assert caught.value.code is ErrorCode.FRAME_CORRUPT
