"""A record and its protobuf message, converted field by field from one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Generic, TypeVar, get_type_hints

from google.protobuf.message import Message

from protocol.errors import ErrorCode
from protocol.types import PeerId
from protocol.wire.convert.fields import AS_SENT, NAME, PEER, Field, raises, read_named

R = TypeVar("R")
M = TypeVar("M", bound=Message)

_NAMES = {"round_number": "round"}
"""Of fields that all messages call by another name."""


def _field_of(hint: Any) -> Field[Any]:
    """The field of a type that bounds its values enough. AssertionError for a type of no such bounds."""
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Field(hint)
    known: dict[Any, Field[Any]] = {bool: AS_SENT, int: AS_SENT, str: NAME, PeerId: PEER}
    assert hint in known, f"a field of type {hint} needs bounds"
    return known[hint]


class Record(Field[R], Generic[R, M]):
    """Converts records of one dataclass to messages of one type and back. It is a Field of other records too.

    Args:
        record: the dataclass.
        message: the type of the messages.
        table: the bounds of each field. A field may be left out if its type gives the bounds: a name, a peer
            id, an enum, or an integer that its protobuf type bounds enough. Any other omission fails at
            import, so that no float, sequence or nested record is read unchecked.
        check: raises ValueError for a record whose fields do not fit together.
        names: of fields that the message calls by another name, besides `round_number`.
        code: of the HetnodeError that `from_pb` raises.
    """

    def __init__(
        self,
        record: type[R],
        message: type[M],
        table: Mapping[str, Field[Any]],
        check: Callable[[R], None] = lambda record: None,
        names: Mapping[str, str] | None = None,
        code: ErrorCode = ErrorCode.BAD_REQUEST,
    ) -> None:
        super().__init__(self._read, self._write)
        self._record, self._message, self._check, self._code = record, message, check, code
        hints = get_type_hints(record)
        assert table.keys() <= hints.keys(), f"a field that {record.__name__} does not have"
        renamed = _NAMES | dict(names or {})
        self._columns = [
            (name, renamed.get(name, name), table.get(name) or _field_of(hint))
            for name, hint in hints.items()
        ]

    def to_pb(self, record: R) -> M:
        return self._write(record)

    def from_pb(self, message: M) -> R:
        """The record in `message`; HetnodeError if a field is out of its bounds. No signature is verified."""
        return raises(self._code)(self._read)(message)

    def _write(self, record: R) -> M:
        values: dict[str, Any] = {}
        for name, column, field in self._columns:
            value = getattr(record, name)
            # Protobuf leaves a field that is None out of the message.
            values[column] = None if value is None else field.write(value)
        return self._message(**values)

    def _read(self, message: M) -> R:
        values: dict[str, Any] = {}
        for name, column, field in self._columns:
            if field.optional and not message.HasField(column):
                values[name] = None
            else:
                # An absent message reads as one of default values; they must be within its bounds.
                where = f"{self._message.__name__}.{column}"
                values[name] = read_named(field, getattr(message, column), where)
        record = self._record(**values)
        self._check(record)
        return record
