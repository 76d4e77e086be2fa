"""Requests and answers as dataclasses arrive as they were sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
from pydantic import BaseModel

from node.ipc.channel import Buffer, Reply
from node.ipc.typed_calls import Request, decode_answer, encode_request, handler, handlers, name_of
from protocol.types import PeerId


class Colour(StrEnum):
    RED = "red"


class Limits(BaseModel):
    most: float
    of_part: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    name: str
    data: bytes
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
    parts: Sequence[Part]
    by_part: Mapping[str, Part]
    buffer: Buffer
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
    """What the server sees and what the client gets, over JSON as the channel sends it."""
    seen: list[object] = []

    def keep(arrived: Request[object]) -> object:
        seen.append(arrived)
        return answer

    method, body, blobs = encode_request(request)
    reply = handler(type(request), keep)[method](
        json.loads(json.dumps(body)), [bytearray(blob) for blob in blobs]
    )
    arrived = Reply(json.loads(json.dumps(reply.body)), [bytearray(blob) for blob in reply.blobs])
    return seen[0], decode_answer(request, arrived)


def test_a_request_and_its_answer_arrive_as_they_were_sent() -> None:
    answer = Answer((Part("p", b"bytes"),), frozenset({"x", "y"}), None)
    assert called(ASK, answer) == (ASK, answer)


def test_large_buffers_are_not_copied() -> None:
    buffer = bytearray(b"large")
    assert encode_request(ASK)[2][-1] is ASK.buffer
    assert handler(Ask, lambda request: request.buffer)["Ask"](
        encode_request(ASK)[1], [*encode_request(ASK)[2][:-1], buffer]
    ).blobs == [buffer]


def test_a_call_without_content_has_no_answer() -> None:
    assert called(Forget(), None) == (Forget(), None)
    assert name_of(Forget) == "Forget"


def test_every_public_method_that_takes_a_request_is_a_handler() -> None:
    class Server:
        def ask(self, call: Ask) -> Answer:
            return Answer(tuple(call.parts), frozenset(), None)

        def _forget(self, _: Forget) -> None: ...

        def rename(self, name: str) -> None: ...

        def stop(self) -> None: ...

    found = handlers(Server())
    assert found.keys() == {"Ask"}
    _, body, blobs = encode_request(ASK)
    answer = decode_answer(ASK, found["Ask"](body, blobs))
    assert answer.parts == ASK.parts


def test_a_value_that_cannot_be_encoded_is_refused() -> None:
    @dataclass(frozen=True)
    class Wrong(Request[None]):
        value: object

    with pytest.raises(TypeError):
        json.dumps(encode_request(Wrong(object()))[1])


def test_a_class_that_declares_no_answer_is_refused() -> None:
    @dataclass(frozen=True)
    class Undeclared(Request):  # type: ignore[type-arg]
        pass

    with pytest.raises(TypeError, match="Undeclared"):
        decode_answer(Undeclared(), Reply({"answer": None}))
