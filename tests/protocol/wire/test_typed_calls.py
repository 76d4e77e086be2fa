"""Requests and answers as dataclasses arrive as they were sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import pytest
from pydantic import BaseModel

from protocol.types import PeerId
from protocol.wire.record_codec import Blob, BufferBlob
from protocol.wire.typed_calls import (
    Reply,
    Request,
    decode_answer,
    decode_request,
    encode_request,
    handler,
    handlers,
    name_of,
)


class Colour(StrEnum):
    RED = "red"


class Limits(BaseModel):
    most: float
    of_part: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    name: str
    data: Blob
    peer: PeerId | None = None


@dataclass(frozen=True)
class Answer:
    parts: tuple[Part, ...]
    names: frozenset[str]
    first: Part | None


@dataclass(frozen=True)
class Ask(Request[Answer]):
    number: int
    share: float
    is_last: bool
    colour: Colour
    limits: Limits
    folder: Path
    pair: tuple[int, str]
    sizes: Mapping[int, int]
    parts: tuple[Part, ...]
    by_part: Mapping[str, Part]
    buffer: BufferBlob
    nothing: Path | None = None


@dataclass(frozen=True)
class Forget(Request[None]):
    pass


ASK = Ask(
    number=1,
    share=0.1,
    is_last=True,
    colour=Colour.RED,
    limits=Limits(most=0.5, of_part={1: (2, 3)}),
    folder=Path("/a/b"),
    pair=(3, "x"),
    sizes={4: 5, 6: 7},
    parts=(Part("a", b"\x00\xff", PeerId("p")), Part("b", b"")),
    by_part={"c": Part("c", b"c")},
    buffer=bytearray(b"large"),
)


def called(request: Request[object], answer: object) -> tuple[object, object]:
    """What the server sees and what the client gets, with blobs as the channel receives them."""
    seen: list[object] = []

    def keep(arrived: Request[object]) -> object:
        seen.append(arrived)
        return answer

    call = encode_request(request)
    arrived = replace(call, blobs=[bytearray(blob) for blob in call.blobs])
    reply = handler(type(request), keep)[call.method](arrived)
    return seen[0], decode_answer(request, replace(reply, blobs=[bytearray(blob) for blob in reply.blobs]))


def test_a_request_and_its_answer_arrive_as_they_were_sent() -> None:
    answer = Answer((Part("p", b"bytes"),), frozenset({"x", "y"}), None)
    assert called(ASK, answer) == (ASK, answer)


def test_large_buffers_are_not_copied() -> None:
    call = encode_request(ASK)
    assert call.blobs[-1] is ASK.buffer
    assert decode_request(Ask, call).buffer is ASK.buffer


def test_a_call_without_content_has_no_answer() -> None:
    assert called(Forget(), None) == (Forget(), None)
    assert name_of(Forget) == "Forget"


def test_every_public_method_that_takes_a_request_is_a_handler() -> None:
    class Server:
        def ask(self, call: Ask) -> Answer:
            return Answer(call.parts, frozenset(), None)

        def _forget(self, _: Forget) -> None: ...

        def rename(self, name: str) -> None: ...

        def stop(self) -> None: ...

    found = handlers(Server())
    assert found.keys() == {"Ask"}
    answer = decode_answer(ASK, found["Ask"](encode_request(ASK)))
    assert answer.parts == ASK.parts


def test_values_of_other_types_are_refused_where_they_are_sent() -> None:
    with pytest.raises(ValueError, match="number"):
        encode_request(replace(ASK, number="1"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none"):
        handler(Forget, lambda _: "an answer")["Forget"](encode_request(Forget()))


def test_a_class_that_declares_no_answer_is_refused() -> None:
    @dataclass(frozen=True)
    class Undeclared(Request):  # type: ignore[type-arg]
        pass

    with pytest.raises(TypeError, match="Undeclared"):
        decode_answer(Undeclared(), Reply())
