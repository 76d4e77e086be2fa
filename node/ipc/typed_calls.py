"""Calls between processes as dataclasses: a request declares the type of its answer.

A request is a frozen dataclass that derives from ``Request[Answer]``; the name of its class is the name of
the call. Values are encoded as JSON, and each bytes value as a blob beside it. The declared types control the
decoding: dataclasses, pydantic models, enums, paths, ranges, run specs, optional values, tuples, sequences,
frozen sets and mappings of these.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Generic, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from node.ipc.channel import Buffer, Handler, Reply
from protocol.spec.run import RunSpec

Answer_co = TypeVar("Answer_co", covariant=True)
AnyRequest = TypeVar("AnyRequest", bound="Request[Any]")

_BUFFERS = (bytes, bytearray, memoryview)
_CODERS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    RunSpec: (lambda spec: spec.canonical_json, RunSpec.from_json),
    range: (lambda each: [each.start, each.stop], lambda ends: range(*ends)),
}
"""Other types, each with a function that encodes a value as JSON and one that decodes it."""


class Request(Generic[Answer_co]):
    """Base of the dataclasses that are sent as calls."""


def name_of(request: type[Request[Any]]) -> str:
    """The name under which calls with this request travel."""
    return request.__name__


def encode_request(request: Request[Any]) -> tuple[str, Mapping[str, Any], Sequence[Buffer]]:
    """The arguments of a channel's `call`: method, body and blobs."""
    blobs: list[Buffer] = []
    return name_of(type(request)), _encode(request, blobs), blobs


def decode_answer(request: Request[Answer_co], reply: Reply) -> Answer_co:
    """The answer to `request`."""
    return cast(Answer_co, _decode(_answer_type(type(request)), reply.body["answer"], reply.blobs))


def handler(request: type[AnyRequest], answer: Callable[[AnyRequest], object]) -> dict[str, Handler]:
    """An entry of a table of handlers (:func:`node.ipc.channel.serve`): `answer` answers each `request`.

    `answer` must return the type that `request` declares as its answer.
    """

    def handle(body: Mapping[str, Any], blobs: Sequence[Buffer]) -> Reply:
        answer_blobs: list[Buffer] = []
        value = answer(_decode(request, body, blobs))
        return Reply({"answer": _encode(value, answer_blobs)}, answer_blobs)

    return {name_of(request): handle}


def handlers(server: object) -> dict[str, Handler]:
    """A handler for each public method of `server` whose first argument is declared as a request.

    For :func:`node.ipc.channel.serve`. Each method must return the type that its request declares.
    """
    found: dict[str, Handler] = {}
    for name, method in inspect.getmembers(server, inspect.ismethod):
        declared = None if name.startswith("_") else next(iter(get_type_hints(method).values()), None)
        if isinstance(declared, type) and issubclass(declared, Request):
            found |= handler(declared, method)
    return found


def _answer_type(request: type[Request[Any]]) -> Any:
    # typing keeps the parameter of Request[...] only in this attribute of the class.
    for base in getattr(request, "__orig_bases__", ()):
        origin = get_origin(base)
        if isinstance(origin, type) and issubclass(origin, Request):
            return get_args(base)[0]
    raise TypeError(f"{request.__name__} does not derive from Request[...]")


@cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _encode(value: object, blobs: list[Buffer]) -> Any:
    """`value` as JSON, in which a bytes value is its index in `blobs`."""
    if isinstance(value, _BUFFERS):
        blobs.append(value)
        return len(blobs) - 1
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple(_CODERS)):
        return _CODERS[type(value)][0](value)
    if isinstance(value, str):  # before the test for sequences, because it is one
        return value
    return _encode_composite(value, blobs)


def _encode_composite(value: object, blobs: list[Buffer]) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return {name: _encode(getattr(value, name), blobs) for name in names}
    if isinstance(value, Mapping):
        # Pairs, because the keys of a JSON object are always text.
        return [[_encode(key, blobs), _encode(each, blobs)] for key, each in value.items()]
    if isinstance(value, Set | Sequence):
        return [_encode(each, blobs) for each in value]
    return value  # a number, a truth value or None; json refuses anything else


def _decode(expected: Any, value: Any, blobs: Sequence[Buffer]) -> Any:
    """The value of type `expected` that :func:`_encode` has encoded."""
    while isinstance(expected, NewType):  # PeerId, for example, is a str
        expected = expected.__supertype__
    if get_origin(expected) is not None:
        return _decode_generic(get_origin(expected), get_args(expected), value, blobs)
    if expected is bytes:
        return bytes(blobs[value])
    if expected in _CODERS:
        return _CODERS[expected][1](value)
    if dataclasses.is_dataclass(expected):
        fields = _field_types(cast(type, expected))
        return cast(type, expected)(**{name: _decode(fields[name], value[name], blobs) for name in fields})
    if isinstance(expected, type) and issubclass(expected, BaseModel | Enum | Path):
        return expected.model_validate(value) if issubclass(expected, BaseModel) else expected(value)
    return value


def _decode_generic(origin: Any, arguments: tuple[Any, ...], value: Any, blobs: Sequence[Buffer]) -> Any:
    if origin in (Union, types.UnionType):
        if set(arguments) <= set(_BUFFERS):
            return blobs[value]  # without a copy, because blobs can be large
        (expected,) = (each for each in arguments if each is not type(None))
        return None if value is None else _decode(expected, value, blobs)
    if issubclass(origin, Mapping):
        of_key, of_value = arguments
        return {_decode(of_key, key, blobs): _decode(of_value, each, blobs) for key, each in value}
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_decode(each, part, blobs) for each, part in zip(arguments, value, strict=True))
    found = (_decode(arguments[0], each, blobs) for each in value)
    return frozenset(found) if issubclass(origin, Set) else tuple(found)
