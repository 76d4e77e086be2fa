"""One codec for records: frozen dataclasses as JSON, and back, by the types of their fields.

Whatever no peer hashes or signs byte by byte uses this codec: events, calls between processes, the status,
control messages. A new field of a record needs no line here. Annotations of the fields state further bounds::

    @dataclass(frozen=True)
    class Question:
        text: Annotated[str, Field(max_length=80)]
        rounds: tuple[int, ...] = ()

    QUESTION = RecordCodec[Question](Question, Bounds(nbytes=4096))
    data = QUESTION.encode(Question("why?"))      # b'{"text":"why?","rounds":[]}'
    question = QUESTION.decode(data)              # HetnodeError BAD_REQUEST for other bytes

Fields may be numbers, texts, truth values, bytes (as base64), enumerations, paths, other dataclasses,
pydantic models, None, and tuples, frozen sets and mappings of these. There are types for three more cases:
:data:`Blob` is bytes that travel beside the JSON, :data:`Span` is a range, and :data:`AS_PAIRS` annotates a
mapping whose keys are neither texts nor numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, Generic, NewType, TypeAlias, TypeVar, cast, get_args

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from protocol.errors import ErrorCode, faulty_peer

T = TypeVar("T")
_another_name: Any = NewType
Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Bounds:
    """How much JSON is parsed. Both are checked before anything is made of the bytes.

    Nesting deeper than 200 is refused, too: the parser's own bound.

    Attributes:
        nbytes: of the JSON.
        values: of all lists and objects together; commas in texts count, too.
    """

    nbytes: int = 1 << 20
    values: int = 1 << 16


UNBOUNDED = Bounds(1 << 62, 1 << 62)
"""For bytes of this program's own, such as those of its child processes."""


class RecordCodec(Generic[T]):
    """Encodes and decodes values of one type: a frozen dataclass, or a type of its fields.

    Fields that the record does not have, absent fields without a default, and values of other types are
    refused. Nothing is converted, but whole numbers where a float is due.

    Args:
        kind: the type, which is T.
        names: of fields that are called otherwise in the JSON, also in nested records.
        code: of the HetnodeError that :meth:`decode` raises.
        ignores_unknown: read records of versions that had more fields.
        nan_is_null: write numbers that are not finite as null, as browsers want, else as NaN and Infinity.
        checks: refuse to write values of other types, for 2 microseconds more.
    """

    def __init__(
        self,
        kind: Any,
        bounds: Bounds = Bounds(),
        *,
        names: Mapping[str, str] | None = None,
        code: ErrorCode = ErrorCode.BAD_REQUEST,
        ignores_unknown: bool = False,
        nan_is_null: bool = False,
        checks: bool = True,
    ) -> None:
        self._name, self._bounds, self._code = getattr(kind, "__name__", str(kind)), bounds, code
        self._warnings: Any = "error" if checks else True
        renamed = dict(names or {})
        config = ConfigDict(
            strict=True,
            extra="ignore" if ignores_unknown else "forbid",
            ser_json_bytes="base64",
            val_json_bytes="base64",
            ser_json_inf_nan="null" if nan_is_null else "constants",
            alias_generator=lambda name: renamed.get(name, name),
            defer_build=True,  # most processes use few of their codecs
        )
        # pydantic takes a config only with a type that cannot have its own, so not with a dataclass itself.
        self._adapter: TypeAdapter[T] = TypeAdapter(_another_name("Record", kind), config=config)

    def encode(self, value: T, blobs: list[Buffer] | None = None) -> bytes:
        """The JSON of `value`. The bytes of each Blob in it are appended to `blobs`.

        ValueError for a value of another type than its field, and for a Blob without `blobs`.
        """
        return self._adapter.serializer.to_json(value, by_alias=True, warnings=self._warnings, context=blobs)

    def read(self, data: bytes | bytearray | str, blobs: Sequence[Buffer] | None = None) -> T:
        """The inverse of :meth:`encode`. ValueError for all other bytes."""
        if len(data) > self._bounds.nbytes:
            raise ValueError(f"{self._name}: {len(data)} bytes, more than {self._bounds.nbytes}")
        commas = data.count(",") if isinstance(data, str) else data.count(b",")
        if commas >= self._bounds.values:
            raise ValueError(f"{self._name}: more than {self._bounds.values} values")
        try:
            return cast(T, self._adapter.validator.validate_json(data, context=blobs))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            count = error.error_count()
            raise ValueError(f"{self._name} with {count} bad fields; {where}: {first['msg']}") from None

    def decode(self, data: bytes | bytearray | str) -> T:
        """The value in what another peer has sent. Raises HetnodeError with the codec's code."""
        try:
            return self.read(data)
        except ValueError as error:
            # The error may quote the data, whose length the other peer chooses.
            cause = f"A record from another peer is not valid: {str(error)[:200]}."
            raise faulty_peer(cause, self._code) from None


class _Apart:
    """The schema of a blob: the JSON has the index of the bytes among the blobs."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        take = _take_bytes if source is bytes else _take_blob
        write = core_schema.plain_serializer_function_ser_schema(_put_blob, info_arg=True)
        return core_schema.with_info_plain_validator_function(take, serialization=write)


def _put_blob(value: Any, info: core_schema.SerializationInfo) -> int:
    if not isinstance(value, Buffer) or info.context is None:
        raise ValueError(f"a {type(value).__name__} in place of bytes, or no list for them")
    blobs: list[Buffer] = cast(list[Buffer], info.context)
    blobs.append(value)
    return len(blobs) - 1


def _take_blob(index: Any, info: core_schema.ValidationInfo) -> Any:
    blobs = info.context or ()
    if type(index) is not int or not 0 <= index < len(blobs):
        raise ValueError("it names bytes that did not come with it")
    return blobs[index]


def _take_bytes(index: Any, info: core_schema.ValidationInfo) -> bytes:
    return bytes(_take_blob(index, info))


@dataclass(frozen=True)
class _As:
    """The schema of a type that travels as another type: that one, and how a value becomes one and back."""

    travels_as: Callable[[Any], Any]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler.generate_schema(self.travels_as(source))
        write = core_schema.plain_serializer_function_ser_schema(self.write, return_schema=schema)
        return core_schema.no_info_after_validator_function(self.read, schema, serialization=write)


Blob = Annotated[bytes, _Apart()]
"""Bytes that travel beside the JSON."""
BufferBlob = Annotated[Buffer, _Apart()]
"""As :data:`Blob`, but a reader gets the buffer into which the bytes were received, without a copy."""
Span = Annotated[
    range, _As(lambda _: tuple[int, int], lambda span: (span.start, span.stop), lambda ends: range(*ends))
]
"""A range of step 1."""
AS_PAIRS = _As(
    lambda mapping: GenericAlias(tuple, (GenericAlias(tuple, get_args(mapping)), ...)),
    lambda mapping: tuple(mapping.items()),
    dict,
)
"""Annotates a mapping whose keys are neither texts nor numbers: it travels as pairs."""
