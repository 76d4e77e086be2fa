"""The bytes that members of a reduction serve: one form, and nothing that no member can have."""

from __future__ import annotations

import pytest
import torch

from protocol.codec.payload import encode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.topk import sparsify
from protocol.reduction.counted_result import CountedResult
from protocol.reduction.partition import partition
from protocol.reduction.parts import Reducer, ReductionLayout, cut_payload, join_parts
from protocol.spec.outer import OuterSpec

LAYOUT = ReductionLayout({"a": (4, 16), "b": (32,)}, OuterSpec(exchange="reduced", chunk=16, top_k=2))
RANGES = partition(LAYOUT.chunks.total, [1.0, 1.0, 1.0])
SENDERS = ((0, 1, 8), (0,), (8,))


def counted(members: int = 9) -> CountedResult:
    tensors = LAYOUT.payload.tensors.items()
    payload = encode(LAYOUT.payload, {name: sparsify(torch.ones(each.numel), each) for name, each in tensors})
    parts = [
        Reducer(LAYOUT, part).reduce([sent], [1.0])
        for part, sent in zip(RANGES, cut_payload(LAYOUT, payload, RANGES), strict=True)
    ]
    return CountedResult(members, SENDERS, join_parts(LAYOUT, parts, RANGES))


def test_what_is_served_reads_back_and_tells_who_is_in_which_part() -> None:
    found = CountedResult.from_bytes(LAYOUT, counted().to_bytes())
    assert found == counted()
    assert [found.counts(position) for position in (0, 1, 2, 8)] == [True, True, False, True]
    assert found.uncounted(LAYOUT, 0) == (RANGES[2],)
    assert found.uncounted(LAYOUT, 2) == tuple(RANGES)
    assert found.uncounted(LAYOUT, 8) == (RANGES[1],)


GOOD = counted().to_bytes()
HEADER = 16


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        GOOD[:-1],
        GOOD + b"x",
        b"\0" + GOOD[1:],
        GOOD[:8] + (8).to_bytes(4, "little") + GOOD[12:],
        GOOD[:8] + bytes(4) + GOOD[12:],
        GOOD[:8] + b"\xff\xff\xff\xff" + GOOD[12:],
        GOOD[:12] + b"\xff\xff\xff\xff" + GOOD[16:],
        GOOD[:12] + (2).to_bytes(4, "little") + GOOD[16:],
        GOOD[:HEADER] + bytes(2) + GOOD[HEADER + 2 :],
        GOOD[:HEADER] + b"\0\2" + GOOD[HEADER + 2 :],
    ],
    ids=range(11),
)
def test_what_no_member_can_have_is_refused(bad: bytes) -> None:
    with pytest.raises(HetnodeError) as refusal:
        CountedResult.from_bytes(LAYOUT, bad)
    assert refusal.value.code is ErrorCode.PAYLOAD_CORRUPT
