"""What members of a round send each other in an exchange "reduced". See :mod:`benchmarks.fuzz`."""

from __future__ import annotations

import math

import torch

from benchmarks.fuzz_seeds import Target
from node.hive.part_reducer import ReducedPart
from protocol.algorithm.partition import PartRange, partition
from protocol.algorithm.topk import sparsify
from protocol.errors import HetnodeError
from protocol.spec.outer import OuterSpec
from protocol.wire.counted_result import CountedResult
from protocol.wire.payload_codec import encode
from protocol.wire.reduction import (
    Reducer,
    ReductionLayout,
    cut_payload,
    decode_part,
    decode_result,
    join_parts,
)

_MEMBERS = 3
_LAYOUT = ReductionLayout(
    {"emb": (19, 16), "0.wq": (16, 16), "0.norm": (16,)}, OuterSpec(exchange="reduced", chunk=64, top_k=4)
)
_RANGES = partition(_LAYOUT.chunks.total, [1.0] * _MEMBERS)


def _reduce(data: bytes) -> None:
    """Reduce `data`, and also with a valid header and length, beside a valid part."""
    part, layout = _RANGES[1], _LAYOUT.part_sent(_RANGES[1])
    size = layout.nbytes - len(layout.header)
    for candidate in (data, layout.header + data[:size].ljust(size, b"\0")):
        try:
            decode_part(_LAYOUT, part, candidate)
            reduced = Reducer(_LAYOUT, part).reduce([candidate, _parts()[1]], [1.0, 2.0])
        except HetnodeError:
            continue
        assert len(reduced) == _LAYOUT.part_reduced(part).nbytes, "all reduced parts have one length"


def _read_result(data: bytes) -> None:
    for reduced in decode_result(_LAYOUT, data).values():
        assert math.isfinite(reduced.squares), "an accepted result has a finite norm"


def _read_answer(data: bytes) -> None:
    try:
        part = ReducedPart.from_bytes(data, _MEMBERS)
    except ValueError:
        return
    assert part.senders, "a part is the sum of some"
    assert set(part.senders) <= set(range(_MEMBERS)), "only members count"
    assert part.to_bytes(_MEMBERS) == data, "an answer has one form"


def _read_counted(data: bytes) -> None:
    """Read `data`, and also with the length of a result."""
    size = len(_counted())
    for candidate in (data, data[:size].ljust(size, b"\0")):
        try:
            found = CountedResult.from_bytes(_LAYOUT, candidate)
        except HetnodeError:
            continue
        assert found.to_bytes() == candidate, "a result has one form"
        for position in range(found.members):
            assert found.counts(position) or found.uncounted(_LAYOUT, position), (
                "counted, or parts are missing"
            )


def _parts() -> list[bytes]:
    tensors = _LAYOUT.payload.tensors.items()
    payload = encode(
        _LAYOUT.payload, {name: sparsify(torch.ones(tensor.numel), tensor) for name, tensor in tensors}
    )
    return cut_payload(_LAYOUT, payload, _RANGES)


def _result(ranges: list[PartRange]) -> bytes:
    parts = _parts()
    reduced = [Reducer(_LAYOUT, part).reduce([data], [1.0]) for part, data in zip(ranges, parts, strict=True)]
    return join_parts(_LAYOUT, reduced, ranges)


def _counted() -> bytes:
    return CountedResult(_MEMBERS, ((0, 2),) * len(_RANGES), _result(_RANGES)).to_bytes()


def targets() -> list[Target]:
    answer = ReducedPart((0, 2), b"reduced").to_bytes(_MEMBERS)
    return [
        Target("part of a payload", _reduce, (_parts()[1], b"\1" * 90)),
        Target("result of a reduction", _read_result, (_result(_RANGES),)),
        Target("answer of a reducer", _read_answer, (answer,)),
        Target("served result", _read_counted, (_counted(),)),
    ]
