"""Fields of messages, and whole records: how each is checked when it is read, and how it is written.

Messages come from other peers, which may be faulty or hostile. Every `read` checks length, count, enum name,
range or finiteness, and raises ValueError for a value out of bounds. Every ``*_from_pb`` raises HetnodeError
instead: FRAME_CORRUPT for the parts of a frame, BAD_REQUEST for the rest. No signature is verified here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_network
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_type_hints

from google.protobuf.message import Message

from protocol.errors import ErrorCode, faulty_peer
from protocol.trust.endpoints import check_endpoint, split_endpoint
from protocol.trust.public_name import public_name
from protocol.types import Part, PeerId, Role

MAX_NAME = 128
"""Characters of the longest identifier: run, codec, device, digest, tensor name."""
MAX_SENTENCE = 1000
"""Characters of the longest sentence for people."""
MAX_SETTING = 4000
"""Characters of the longest setting of a change: a mixture of many sources."""
MAX_STAGES = 512
MAX_REPLICAS = 10_000
MAX_BANNED = 10_000
MAX_RELAYS = 256

T = TypeVar("T")
S = TypeVar("S", bound=Sequence[Any])
R = TypeVar("R")
M = TypeVar("M", bound=Message)


def _unchanged(value: Any) -> Any:
    return value


@dataclass(eq=False)
class Field(Generic[T]):
    """One field of a record. An optional field is None where the message leaves it out.

    Attributes:
        read: the record's value from the message's. Raises ValueError for a value outside its bounds.
        write: the message's value from the record's.
        code: of the HetnodeError that `from_pb` raises.
    """

    read: Callable[[Any], T]
    write: Callable[[T], Any] = _unchanged
    optional: bool = False
    code: ErrorCode = ErrorCode.BAD_REQUEST

    def read_named(self, value: Any, what: str) -> T:
        """As `read`; the ValueError of a failed check names `what`."""
        try:
            return self.read(value)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def from_pb(self, value: Any, what: str = "") -> T:
        """As `read`; the HetnodeError of a failed check names `what`, if it is given."""
        try:
            return self.read_named(value, what) if what else self.read(value)
        except ValueError as error:
            # The error may quote the message, whose length the other peer chooses.
            cause = f"A message from another peer is not valid: {str(error)[:200]}."
            raise faulty_peer(cause, self.code) from None


def shortened(sentence: str) -> str:
    """`sentence`, cut to the MAX_SENTENCE characters that a receiver accepts."""
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[: MAX_SENTENCE - 4]} ..."


def printable(value: str, limit: int = MAX_NAME, empty: bool = False) -> str:
    """`value`. Raises ValueError if it is empty (unless `empty`), too long, or not printable."""
    if len(value) > limit:
        raise ValueError(f"{len(value)} characters, more than {limit}")
    if not value and not empty:
        raise ValueError("an empty string")
    if not value.isprintable():
        raise ValueError("characters that cannot be printed")
    return value


def counted(values: S, limit: int, least: int = 0) -> S:
    """`values`. Raises ValueError unless it has between `least` and `limit` elements."""
    if not least <= len(values) <= limit:
        raise ValueError(f"{len(values)} elements, expected {least} to {limit}")
    return values


def _name(value: str) -> str:
    # Thousands of records in memory have the same names: one string for all of them.
    return sys.intern(printable(value))


def _peer_id(value: str) -> PeerId:
    """A peer id by its length; protocol.trust.envelope.public_key_of tells whether it holds a key."""
    return PeerId(sys.intern(printable(value, 64)))


def _sha256_hex(value: str) -> str:
    if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError("not a sha-256 in lower-case hex")
    return value


def _host_and_port(value: str) -> str:
    """``host:port``, or "" for a peer that accepts no links."""
    if value:
        split_endpoint(printable(value, 261))
    return value


def _dialable(value: str) -> str:
    """As :func:`_host_and_port`, for the endpoint that a peer gives itself."""
    if _host_and_port(value):
        check_endpoint(value)
    return value


def _source(value: str) -> str:
    """An IPv4 address or an IPv6 /64."""
    network = ip_network(printable(value, MAX_NAME))
    if ("/" in value) is not (network.version == 6) or network.prefixlen not in (32, 64):
        raise ValueError(f"{value} is neither an IPv4 address nor an IPv6 /64")
    return value


AS_SENT: Field[Any] = Field(_unchanged)
"""A value that its protobuf type bounds enough."""
NAME = Field(_name)
PEER = Field(_peer_id)
SHA256 = Field(_sha256_hex)
ENDPOINT = Field(_host_and_port)
"""Not whether a peer may have it: a plan with one bad endpoint is a plan for all others."""
DIALABLE = Field(_dialable)
SOURCE = Field(_source)
ROLE: Field[Role] = Field(Role)
PART: Field[Part] = Field(Part)
SENTENCE = Field(lambda value: printable(value, MAX_SENTENCE, empty=True), shortened)
"""A sentence for people, or ""."""
SETTING = Field(lambda value: printable(value, MAX_SETTING))

PUBLIC_NAME = Field(public_name)
"""The public name that a peer chooses, or ""."""


def between(least: float, most: float) -> Field[Any]:
    """A number of which `least` <= number <= `most`. NaN is none."""

    def read(value: float) -> float:
        if not least <= value <= most:
            raise ValueError(f"{value} is not within {least:g} and {most:g}")
        return value

    return Field(read)


INT64 = between(0, 2**63 - 1)
"""A uint64 that also fits a signed integer of 64 bits, as torch and numpy use it."""
LEAST_POSITIVE = math.ulp(0.0)
STAGE = between(0, MAX_STAGES - 1)


def several(field: Field[T], limit: int, least: int = 0, key: str = "") -> Field[tuple[T, ...]]:
    """From `least` to `limit` values of `field`. If `key` is given, no two have the same attribute `key`.

    `key` may name an attribute of an attribute, as ``descriptor.owner``.
    """

    def read(values: Sequence[Any]) -> tuple[T, ...]:
        # Counted before they are read, so that a hostile peer cannot cause unbounded work.
        found = tuple(map(field.read, counted(values, limit, least)))
        if key and len(set(map(attrgetter(key), found))) != len(found):
            raise ValueError(f"two elements with the same {key}")
        return found

    return Field(read, lambda values: [field.write(value) for value in values], code=field.code)


name_from_pb, sentence_from_pb, peer_from_pb = NAME.from_pb, SENTENCE.from_pb, PEER.from_pb
setting_from_pb = SETTING.from_pb
endpoint_from_pb, role_from_pb, part_from_pb = ENDPOINT.from_pb, ROLE.from_pb, PART.from_pb
public_name_from_pb = PUBLIC_NAME.from_pb


def banned_from_pb(values: Sequence[str]) -> frozenset[PeerId]:
    return frozenset(several(PEER, MAX_BANNED).from_pb(values))


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
    """

    def __init__(
        self,
        record: type[R],
        message: type[M],
        table: Mapping[str, Field[Any]],
        check: Callable[[R], None] = lambda record: None,
        code: ErrorCode = ErrorCode.BAD_REQUEST,
    ) -> None:
        super().__init__(self._read, self.to_pb, code=code)
        self._record, self._message, self._check = record, message, check
        hints = get_type_hints(record)
        assert table.keys() <= hints.keys(), f"a field that {record.__name__} does not have"
        self._columns = [
            (name, _NAMES.get(name, name), table.get(name) or _field_of(hint)) for name, hint in hints.items()
        ]

    def from_pb(self, message: M, what: str = "") -> R:
        return super().from_pb(message, what)

    def to_pb(self, record: R) -> M:
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
                values[name] = field.read_named(getattr(message, column), where)
        record = self._record(**values)
        self._check(record)
        return record
