"""What members of a round send each other in an exchange "reduced". See :mod:`benchmarks.fuzz`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, partial

import torch
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import AveragingData
from hivemind.proto.runtime_pb2 import Tensor

from benchmarks.fuzz_seeds import PEERS, Target, messages_in, stream_of
from node.exchange.hive.reduction.part_check import PartCheck
from node.exchange.hive.reduction.part_plan import PartPlan
from node.exchange.hive.reduction.part_reducer import ReducedPart
from protocol.codec.payload import encode
from protocol.errors import HetnodeError
from protocol.math.topk import sparsify
from protocol.pb.payload_pb2 import CountRequest
from protocol.reduction.counted_result import CountedResult, mask_of, senders_of
from protocol.reduction.partition import PartRange, partition
from protocol.reduction.parts import (
    Reducer,
    ReductionLayout,
    cut_payload,
    decode_part,
    decode_result,
    join_parts,
)
from protocol.reduction.stage_reducers import StageReducers
from protocol.server.line import UNLIMITED
from protocol.spec.outer import OuterSpec

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


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _plan() -> PartPlan:
    """The first member reduces all, and the second one checks it."""
    total = _LAYOUT.chunks.total
    ranges = PartRange(0, total), PartRange(total, total), PartRange(total, total)
    members = tuple(map(PeerID.from_base58, PEERS[:_MEMBERS]))
    return PartPlan(_LAYOUT, members, (1.0,) * _MEMBERS, ranges, (1, None, None))


async def _stream(data: bytes) -> AsyncIterator[AveragingData]:
    for message in messages_in(data):
        yield AveragingData.FromString(message)


def _checked(call: Callable[[PartCheck, bytes], Awaitable[object]], data: bytes) -> None:
    """Make a call to a checker that has the copies of two of three members."""

    async def run() -> None:
        check = PartCheck(_plan(), 1, b"group", StageReducers(_LAYOUT), asyncio.Lock(), bytes, 0.0, UNLIMITED)
        for sender in (0, 1):
            assert not (await check.copy(sender, _stream(_copies()))).refusal
        await call(check, data)

    try:
        _loop().run_until_complete(run())
    except DecodeError as refusal:
        raise ValueError(refusal) from None


async def _copy(check: PartCheck, data: bytes) -> None:
    refusal = (await check.copy(2, _stream(data))).refusal
    again = (await check.copy(2, _stream(_copies()))).refusal
    assert bool(refusal) != bool(again), "copies are taken once"


async def _count(check: PartCheck, data: bytes) -> None:
    reply = await check.count(CountRequest.FromString(data))
    if not reply.refusal:
        assert set(senders_of(reply.senders, _MEMBERS)) == {0, 1}, "both have sent copies"


async def _sign(check: PartCheck, data: bytes) -> None:
    assert not (await check.count(CountRequest(senders=mask_of((0, 1), _MEMBERS)))).refusal
    reply = await check.sign(_stream(data))
    if not reply.refusal:
        [answer] = [AveragingData.FromString(each).tensor_part.buffer for each in messages_in(data)]
        assert ReducedPart.from_bytes(answer, _MEMBERS).senders == (0, 1), "nothing else is signed"


def _copies() -> bytes:
    """What each member sends to the checker."""
    [part] = _plan().parts[0]
    tensors = _LAYOUT.payload.tensors.items()
    payload = encode(
        _LAYOUT.payload, {name: sparsify(torch.ones(tensor.numel), tensor) for name, tensor in tensors}
    )
    [copy] = cut_payload(_LAYOUT, payload, [part])
    return _message(copy)


def _sums() -> bytes:
    """The answers of the reducer for two such members."""
    [part] = _plan().parts[0]
    copy = AveragingData.FromString(messages_in(_copies())[0]).tensor_part.buffer
    reduced = Reducer(_LAYOUT, part).reduce([copy, copy], [1.0, 1.0])
    return _message(ReducedPart((0, 1), reduced).to_bytes(_MEMBERS))


def _message(buffer: bytes) -> bytes:
    return stream_of([AveragingData(tensor_part=Tensor(buffer=buffer)).SerializeToString()])


def targets() -> list[Target]:
    request = CountRequest(group_id=b"group", since=1, senders=mask_of((0, 1), _MEMBERS))
    answer = ReducedPart((0, 2), b"reduced").to_bytes(_MEMBERS)
    return [
        Target("part of a payload", _reduce, (_parts()[1], b"\1" * 90)),
        Target("result of a reduction", _read_result, (_result(_RANGES),)),
        Target("answer of a reducer", _read_answer, (answer,)),
        Target("rpc_copy", partial(_checked, _copy), (_copies(),)),
        Target("rpc_count", partial(_checked, _count), (request.SerializeToString(),), CountRequest),
        Target("rpc_sign", partial(_checked, _sign), (_sums(),)),
        Target("served result", _read_counted, (_counted(),)),
    ]
