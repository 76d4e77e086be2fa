"""Checks of single fields of a message, and what a failed check raises.

The ``*_from_pb`` functions of this package read messages of other peers, which may be faulty or hostile. They
check lengths, counts, enum names, ranges and finiteness before they build a record, and raise a HetnodeError
for every message that fails: FRAME_CORRUPT for the parts of a frame, BAD_REQUEST for the rest. They verify no
signatures (see protocol.trust.envelope).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

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


def _raises(code: ErrorCode) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that turns the ValueError of a failed check into a HetnodeError with `code`."""

    def decorate(convert: Callable[P, T]) -> Callable[P, T]:
        @wraps(convert)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return convert(*args, **kwargs)
            except ValueError as error:
                raise HetnodeError(
                    code,
                    f"A message from another peer is not valid: {str(error)[:200]}.",
                    "Run the same version of hetnode on every peer; if they already do, that peer is faulty.",
                ) from None

        return checked

    return decorate


raises_bad_request = _raises(ErrorCode.BAD_REQUEST)
raises_frame_corrupt = _raises(ErrorCode.FRAME_CORRUPT)


def shortened(sentence: str) -> str:
    """`sentence`, cut to the MAX_SENTENCE characters that a receiver accepts."""
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[: MAX_SENTENCE - 4]} ..."


def printable(value: str, what: str, limit: int = MAX_NAME, empty: bool = False) -> str:
    """`value`. Raises ValueError if it is empty (unless `empty`), too long, or not printable."""
    if len(value) > limit:
        raise ValueError(f"{what} has {len(value)} characters, more than {limit}")
    if not value and not empty:
        raise ValueError(f"{what} is empty")
    if not value.isprintable():
        raise ValueError(f"{what} holds characters that cannot be printed")
    return value


def check_count(values: Sequence[object], what: str, limit: int, least: int = 0) -> None:
    """Raises ValueError unless `values` has between `least` and `limit` elements."""
    if not least <= len(values) <= limit:
        raise ValueError(f"{len(values)} {what}, expected {least} to {limit}")


def peer_id(value: str) -> PeerId:
    """`value` as a peer id. Raises ValueError if it is too long to be one."""
    return PeerId(printable(value, "the peer id", 64))


def sha256_hex(value: str, what: str) -> str:
    """`value`. Raises ValueError if it is not a sha-256."""
    if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{what} is not a sha-256 in lower-case hex")
    return value


def host_and_port(value: str) -> str:
    """`value`, which is ``host:port`` or "". Raises ValueError if it is neither."""
    if not value:
        return value
    host, _, port = printable(value, "the endpoint", 261).rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"the endpoint {value!r} is not host:port")
    return value


@raises_bad_request
def name_from_pb(value: str, what: str) -> str:
    """`value` as a printable name of at most MAX_NAME characters; `what` names it in the error."""
    return printable(value, what)


@raises_bad_request
def sentence_from_pb(value: str, what: str) -> str:
    """`value` as a printable sentence for people, or ""."""
    return printable(value, what, MAX_SENTENCE, empty=True)


@raises_bad_request
def peer_from_pb(value: str) -> PeerId:
    """A peer id by its length; protocol.trust.envelope.public_key_of tells whether it holds a key."""
    return peer_id(value)


@raises_bad_request
def endpoint_from_pb(value: str) -> str:
    """``host:port``, or "" for a peer that accepts no links."""
    return host_and_port(value)


@raises_bad_request
def role_from_pb(value: str) -> Role:
    return Role(value)


@raises_bad_request
def part_from_pb(value: str) -> Part:
    return Part(value)


@raises_bad_request
def banned_from_pb(values: Sequence[str]) -> frozenset[PeerId]:
    check_count(values, "banned peers", MAX_BANNED)
    return frozenset(map(peer_id, values))
