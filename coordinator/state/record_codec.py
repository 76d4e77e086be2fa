"""Frozen records as bytes, and back: msgpack in the order that the annotations of the records give.

A record is the list of its fields, a mapping the list of its keys and values in order. What occurs many times
is written once, and read as one object: texts and sets by their value, records by their identity. So plans
that share replicas share them again, and a peer id that a thousand reports name takes a few bytes in each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from coordinator.state.persistent_map import PersistentMap
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec

T = TypeVar("T")


def pack(kind: type[T], value: T) -> bytes:
    """The bytes of `value`. ValueError for what an annotation does not permit, or msgpack cannot contain."""
    writer = _Writer()
    try:
        root = _form(cast(Hashable, kind)).write(value, writer)
        packed: bytes = msgpack.packb([list(writer.texts), root])
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return packed


def unpack(kind: type[T], packed: bytes) -> T:
    """The value that :func:`pack` wrote. ValueError for all other bytes."""
    try:
        content = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"no msgpack: {error}") from None
    texts, root = _list(content, 2)
    if not all(type(text) is str for text in _list(texts)):
        raise ValueError("a text is of another type")
    value: T = _form(cast(Hashable, kind)).read(root, _Reader(texts))
    return value


@dataclass
class _Writer:
    """The numbers of what is written: of texts and sets by their value, of records by their identity."""

    texts: dict[str, int] = field(default_factory=dict)
    records: dict[Any, dict[int, int]] = field(default_factory=dict)
    sets: dict[Any, dict[frozenset[Any], int]] = field(default_factory=dict)


@dataclass
class _Reader:
    """All texts, and by type the records or sets so far."""

    texts: list[str]
    found: dict[Any, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Form:
    """How a value of one type is written and read. `read` raises ValueError."""

    write: Callable[[Any, _Writer], Any]
    read: Callable[[Any, _Reader], Any]


@cache
def _form(kind: Hashable) -> _Form:
    if isinstance(kind, NewType):
        return _form(kind.__supertype__)
    if isinstance(kind, type) and not get_args(kind):
        return _class(kind)
    return _generic(kind, get_origin(kind), get_args(kind))


def _class(kind: type[Any]) -> _Form:
    if kind in _LEAVES:
        return _LEAVES[kind]
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    if issubclass(kind, Enum):
        return _Form(lambda value, _: _exact(kind, value).value, lambda raw, _: kind(raw))
    raise TypeError(f"{kind} has no form as bytes")


def _generic(kind: Any, origin: Any, inner: tuple[Any, ...]) -> _Form:
    if origin in (Union, UnionType):
        return _optional(inner)
    if origin is tuple:
        return _sequence(inner[0]) if inner[1:] == (...,) else _fixed(inner)
    if origin is frozenset:
        return _set(kind, inner[0])
    if origin in (Mapping, PersistentMap):
        return _mapping(PersistentMap if origin is PersistentMap else dict, *inner)
    raise TypeError(f"{kind} has no form as bytes")


def _exact(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _list(raw: Any, length: int | None = None) -> list[Any]:
    found: list[Any] = _exact(list, raw)
    if length is not None and len(found) != length:
        raise ValueError(f"{len(found)} values in place of {length}")
    return found


def _numbered(raw: Any, found: list[Any]) -> Any:
    if not 0 <= _exact(int, raw) < len(found):
        raise ValueError("it refers to what it does not contain")
    return found[raw]


def _leaf(kind: type[Any]) -> _Form:
    return _Form(lambda value, _: _exact(kind, value), lambda raw, _: _exact(kind, raw))


def _write_text(value: Any, writer: _Writer) -> int:
    # Enumerations of texts may stand for texts.
    text = str.__str__(value) if isinstance(value, str) else _exact(str, value)
    return writer.texts.setdefault(text, len(writer.texts))


def _write_number(value: Any, _: _Writer) -> float:
    return float(value) if type(value) is int else float(_exact(float, value))


def _read_spec(raw: Any, reader: _Reader) -> RunSpec:
    try:
        return RunSpec.from_json(_numbered(raw, reader.texts))
    except HetnodeError as error:
        raise ValueError(error.cause) from None


_LEAVES: Mapping[Any, _Form] = {
    bool: _leaf(bool),
    int: _leaf(int),
    bytes: _leaf(bytes),
    # A rule may set a whole number where seconds are due.
    float: _Form(_write_number, lambda raw, _: _exact(float, raw)),
    str: _Form(_write_text, lambda raw, reader: _numbered(raw, reader.texts)),
    RunSpec: _Form(lambda value, writer: _write_text(value.canonical_json, writer), _read_spec),
}


def _optional(inner: tuple[Any, ...]) -> _Form:
    others = [each for each in inner if each is not NoneType]
    if len(others) != 1 or len(inner) != len(others) + 1:
        raise TypeError(f"a union of {inner} has no form as bytes")
    form = _form(others[0])
    return _Form(
        lambda value, writer: None if value is None else form.write(value, writer),
        lambda raw, reader: None if raw is None else form.read(raw, reader),
    )


def _sequence(inner: Any) -> _Form:
    form = _form(inner)
    return _Form(
        lambda value, writer: [form.write(each, writer) for each in _exact(tuple, value)],
        lambda raw, reader: tuple([form.read(each, reader) for each in _list(raw)]),
    )


def _fixed(inner: tuple[Any, ...]) -> _Form:
    forms = [_form(each) for each in inner]

    def write(value: Any, writer: _Writer) -> Any:
        return [form.write(each, writer) for form, each in zip(forms, _exact(tuple, value), strict=True)]

    def read(raw: Any, reader: _Reader) -> Any:
        return tuple(
            [form.read(each, reader) for form, each in zip(forms, _list(raw, len(forms)), strict=True)]
        )

    return _Form(write, read)


def _set(kind: Any, inner: Any) -> _Form:
    form = _form(inner)

    def write(value: Any, writer: _Writer) -> Any:
        numbers = writer.sets.setdefault(kind, {})
        if _exact(frozenset, value) in numbers:
            return numbers[value]
        # Sorted: the order of a set differs between processes.
        written = [form.write(each, writer) for each in sorted(value)]
        numbers[value] = len(numbers)
        return written

    def read(raw: Any, reader: _Reader) -> Any:
        found = reader.found.setdefault(kind, [])
        if type(raw) is int:
            return _numbered(raw, found)
        value = frozenset([form.read(each, reader) for each in _list(raw)])
        if len(value) != len(raw):
            raise ValueError("a set contains a value twice")
        found.append(value)
        return value

    return _Form(write, read)


def _mapping(make: Callable[[dict[Any, Any]], Any], key_kind: Any, value_kind: Any) -> _Form:
    keys, values = _form(key_kind), _form(value_kind)

    def write(value: Any, writer: _Writer) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"a {type(value).__name__} in place of a mapping")
        return [[keys.write(key, writer), values.write(each, writer)] for key, each in value.items()]

    def read(raw: Any, reader: _Reader) -> Any:
        found = {}
        for pair in _list(raw):
            key, value = _list(pair, 2)
            found[keys.read(key, reader)] = values.read(value, reader)
        if len(found) != len(raw):
            raise ValueError("a mapping contains a key twice")
        return make(found)

    return _Form(write, read)


def _record(kind: type[Any]) -> _Form:
    hints = get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    forms = [_form(hints[name]) for name in names]

    def write(value: Any, writer: _Writer) -> Any:
        numbers = writer.records.setdefault(kind, {})
        if id(_exact(kind, value)) in numbers:
            return numbers[id(value)]
        written = [form.write(getattr(value, name), writer) for name, form in zip(names, forms, strict=True)]
        # After its fields, as in `read`.
        numbers[id(value)] = len(numbers)
        return written

    def read(raw: Any, reader: _Reader) -> Any:
        found = reader.found.setdefault(kind, [])
        if type(raw) is int:
            return _numbered(raw, found)
        given = _list(raw, len(forms))
        value = kind(
            **{name: form.read(each, reader) for name, form, each in zip(names, forms, given, strict=True)}
        )
        found.append(value)
        return value

    return _Form(write, read)
