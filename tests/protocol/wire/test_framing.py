"""Frames survive the split into chunks, and a neighbour's lies are refused before they cost memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import DType, Frame, FrameId, FrameKind, TensorHeader
from protocol.wire import framing
from protocol.wire.framing import CHUNK_BYTES, FrameAssembler, chunks

ID = FrameId(1, 2, 3, 4, FrameKind.FORWARD)


def frame_of(*sizes: int) -> Frame:
    tensors = tuple(TensorHeader(f"t{i}", DType.U8, (n,)) for i, n in enumerate(sizes))
    return Frame(ID, tensors, bytes(i % 251 for i in range(sum(sizes))))


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES // 2), min_size=0, max_size=3))
def test_a_frame_comes_out_of_its_chunks_as_it_went_in(sizes: list[int]) -> None:
    frame = Frame(ID, tuple(TensorHeader("t", DType.U8, (n,)) for n in sizes), bytes(sum(sizes)))
    assembler = FrameAssembler(max_bytes=10 * CHUNK_BYTES)
    done = assembler.header(frame.id, frame.tensors, len(frame.payload))
    for chunk in chunks(frame):
        assert done is None
        done = assembler.chunk(bytes(chunk))
    assert done == frame


def test_a_frame_over_the_limit_is_refused_at_its_header() -> None:
    with pytest.raises(HetnodeError) as refused:
        FrameAssembler(max_bytes=99).header(ID, frame_of(100).tensors, 100)
    assert refused.value.code is ErrorCode.FRAME_TOO_LARGE


@pytest.mark.parametrize(
    ("tensors", "nbytes"),
    [
        (frame_of(10).tensors, 11),
        (frame_of(10).tensors, 9),
        ((), 1),
        (frame_of(*[1] * (framing.MAX_TENSORS + 1)).tensors, framing.MAX_TENSORS + 1),
        ((TensorHeader("t", DType.F64, (2**30, 2**30)),), 16),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tensors: tuple[TensorHeader, ...], nbytes: int) -> None:
    with pytest.raises(HetnodeError) as refused:
        FrameAssembler(max_bytes=2**40).header(ID, tensors, nbytes)
    assert refused.value.code is ErrorCode.FRAME_CORRUPT


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=12))
def test_any_order_of_headers_and_chunks_gives_frames_or_the_one_error(events: list[bytes | None]) -> None:
    assembler = FrameAssembler(max_bytes=64)
    tensors = frame_of(32).tensors
    for event in events:
        try:
            done = assembler.header(ID, tensors, 32) if event is None else assembler.chunk(event)
        except HetnodeError as refused:
            assert refused.code is ErrorCode.FRAME_CORRUPT  # noqa: PT017 (an error is one of two good outcomes)
            break
        assert done is None or len(done.payload) == 32
