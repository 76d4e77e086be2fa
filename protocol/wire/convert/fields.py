"""Single fields of a message: how each is checked when it is read, and how it is written.

Messages come from other peers, which may be faulty or hostile. Every `read` checks length, count, enum name,
range or finiteness, and raises ValueError for a value out of bounds. The ``*_from_pb`` functions of this
package raise a HetnodeError instead: FRAME_CORRUPT for the parts of a frame, BAD_REQUEST for the rest. They
verify no signatures (see protocol.trust.envelope).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Part, PeerId, Role

MAX_NAME = 128
"""Characters of the longest identifier: run, codec, device, digest, tensor name."""
MAX_SENTENCE = 1000
"""Characters of the longest sentence for people."""
MAX_STAGES = 512
MAX_REPLICAS = 10_000
MAX_BANNED = 10_000

P = ParamSpec("P")
T = TypeVar("T")


def _unchanged(value: Any) -> Any:
    return value


@dataclass(eq=False)
class Field(Generic[T]):
    """One field of a record. An optional field is None where the message leaves it out.

    Attributes:
        read: the record's value from the message's. Raises ValueError for a value outside its bounds.
        write: the message's value from the record's.
    """

    read: Callable[[Any], T]
    write: Callable[[T], Any] = _unchanged
    optional: bool = False


def raises(code: ErrorCode) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that turns the ValueError of a failed check into a HetnodeError with `code`."""

    def decorate(convert: Callable[P, T]) -> Callable[P, T]:
        @wraps(convert)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return convert(*args, **kwargs)
            except ValueError as error:
                raise HetnodeError(
                    code,
                    # The error may quote the message, whose length the other peer chooses.
                    f"A message from another peer is not valid: {str(error)[:200]}.",
                    "Run the same version of hetnode on every peer; if they already do, that peer is faulty.",
                ) from None

        return checked

    return decorate


raises_bad_request = raises(ErrorCode.BAD_REQUEST)


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


def check_count(values: Sequence[object], limit: int, least: int = 0) -> None:
    """Raises ValueError unless `values` has between `least` and `limit` elements."""
    if not least <= len(values) <= limit:
        raise ValueError(f"{len(values)} elements, expected {least} to {limit}")


def _peer_id(value: str) -> PeerId:
    """A peer id by its length; protocol.trust.envelope.public_key_of tells whether it holds a key."""
    return PeerId(printable(value, 64))


def _sha256_hex(value: str) -> str:
    if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError("not a sha-256 in lower-case hex")
    return value


def _host_and_port(value: str) -> str:
    """``host:port``, or "" for a peer that accepts no links."""
    if not value:
        return value
    host, _, port = printable(value, 261).rpartition(":")
    # isdigit() alone accepts digits of other scripts, and int() thousands of digits.
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"{value!r} is not host:port")
    return value


AS_SENT: Field[Any] = Field(_unchanged)
"""A value that its protobuf type bounds enough."""
NAME = Field(printable)
PEER = Field(_peer_id)
SHA256 = Field(_sha256_hex)
ENDPOINT = Field(_host_and_port)
ROLE: Field[Role] = Field(Role)
PART: Field[Part] = Field(Part)
SENTENCE = Field(lambda value: printable(value, MAX_SENTENCE, empty=True), shortened)
"""A sentence for people, or ""."""


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
    """From `least` to `limit` values of `field`. If `key` is given, no two have the same attribute `key`."""

    def read(values: Sequence[Any]) -> tuple[T, ...]:
        # Counted before they are read, so that a hostile peer cannot cause unbounded work.
        check_count(values, limit, least)
        found = tuple(map(field.read, values))
        if key and len({getattr(value, key) for value in found}) != len(found):
            raise ValueError(f"two elements with the same {key}")
        return found

    return Field(read, lambda values: [field.write(value) for value in values])


@raises_bad_request
def name_from_pb(value: str, what: str) -> str:
    """`value` as a printable name of at most MAX_NAME characters; `what` names it in the error."""
    return read_named(NAME, value, what)


@raises_bad_request
def sentence_from_pb(value: str, what: str) -> str:
    """`value` as a printable sentence for people, or ""; `what` names it in the error."""
    return read_named(SENTENCE, value, what)


def read_named(field: Field[T], value: Any, what: str) -> T:
    """`value`, checked; the ValueError of a failed check names `what`."""
    try:
        return field.read(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


peer_from_pb = raises_bad_request(PEER.read)
endpoint_from_pb = raises_bad_request(ENDPOINT.read)
role_from_pb = raises_bad_request(ROLE.read)
part_from_pb = raises_bad_request(PART.read)


@raises_bad_request
def banned_from_pb(values: Sequence[str]) -> frozenset[PeerId]:
    return frozenset(several(PEER, MAX_BANNED).read(values))
