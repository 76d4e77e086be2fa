"""Calls as dataclasses: a request declares the type of its answer.

A request is a frozen dataclass that derives from ``Request[Answer]``; the name of its class is the name of
the call. Requests and answers travel as :class:`protocol.wire.record_codec.RecordCodec` has it. Large bytes
are declared as Blob. So a process calls its children, and people and their tools call a coordinator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from protocol.wire.record_codec import UNBOUNDED, Buffer, RecordCodec

Answer_co = TypeVar("Answer_co", covariant=True)
AnyRequest = TypeVar("AnyRequest", bound="Request[Any]")


@dataclass(frozen=True)
class Call:
    """A call as it travels. `body` is the request as JSON."""

    method: str
    body: bytes | bytearray = b"null"
    blobs: Sequence[Buffer] = ()


@dataclass(frozen=True)
class Reply:
    """The answer to a call as it travels: JSON and blobs."""

    body: bytes | bytearray = b"null"
    blobs: Sequence[Buffer] = ()


Handler = Callable[[Call], Reply]


class Request(Generic[Answer_co]):
    """Base of the dataclasses that are sent as calls."""


def name_of(request: type[Request[Any]]) -> str:
    """The name under which calls with this request travel."""
    return request.__name__


def encode_request(request: Request[Any]) -> Call:
    """The call with `request`. ValueError for a field of another type than it declares."""
    blobs: list[Buffer] = []
    return Call(name_of(type(request)), _codec(type(request)).encode(request, blobs), blobs)


def decode_request(request: type[AnyRequest], call: Call) -> AnyRequest:
    """The inverse of :func:`encode_request`. ValueError for a call with another body."""
    return cast(AnyRequest, _codec(request).read(call.body, call.blobs))


def encode_answer(request: type[Request[Answer_co]], answer: object) -> Reply:
    """The reply with `answer` to a request of this type. ValueError for an answer of another type."""
    blobs: list[Buffer] = []
    return Reply(_codec_of_answer(request).encode(answer, blobs), blobs)


def decode_answer(request: Request[Answer_co], reply: Reply) -> Answer_co:
    """The answer to `request`. ValueError for a reply with another body."""
    return cast(Answer_co, _codec_of_answer(type(request)).read(reply.body, reply.blobs))


def handler(request: type[AnyRequest], answer: Callable[[AnyRequest], object]) -> dict[str, Handler]:
    """An entry of a table of handlers (:func:`node.ipc.channel.serve`): `answer` answers each `request`.

    `answer` must return the type that `request` declares as its answer.
    """

    def handle(call: Call) -> Reply:
        return encode_answer(request, answer(decode_request(request, call)))

    return {name_of(request): handle}


def handlers(server: object) -> dict[str, Handler]:
    """A handler for each method of :func:`answering`, for :func:`node.ipc.channel.serve`."""
    found: dict[str, Handler] = {}
    for request, method in answering(server).items():
        found |= handler(request, method)
    return found


def answering(server: object) -> dict[type[Request[Any]], Callable[..., Any]]:
    """The public methods of `server` whose first argument is declared as a request, by its type.

    Each must return the type that its request declares as its answer.
    """
    found: dict[type[Request[Any]], Callable[..., Any]] = {}
    for name, method in inspect.getmembers(server, inspect.ismethod):
        declared = None if name.startswith("_") else next(iter(get_type_hints(method).values()), None)
        if isinstance(declared, type) and issubclass(declared, Request):
            found[declared] = method
    return found


def _codec(request: Any) -> RecordCodec[Any]:
    return _codec_for(request, False)


def _codec_of_answer(request: Any) -> RecordCodec[Any]:
    return _codec_for(request, True)


@cache
def _codec_for(request: type[Request[Any]], answer: bool) -> RecordCodec[Any]:
    return RecordCodec(_answer_type(request) if answer else request, UNBOUNDED)


def _answer_type(request: type[Request[Any]]) -> Any:
    # typing keeps the parameter of Request[...] only in this attribute of the class.
    for base in getattr(request, "__orig_bases__", ()):
        origin = get_origin(base)
        if isinstance(origin, type) and issubclass(origin, Request):
            return get_args(base)[0]
    raise TypeError(f"{request.__name__} does not derive from Request[...]")
