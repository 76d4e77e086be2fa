"""The calls of members to a coordinator that has an object store, and what it answers.

They travel as :mod:`protocol.wire.typed_calls`, over the service Operator. A member gets URLs that are signed
for one object, one kind of request and some minutes: credentials of the store stay with the coordinator. A
URL is a secret, so no log has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address

from protocol.types import Part
from protocol.wire.typed_calls import Request

MOST_ASKED = 4096
"""Payloads that one call names."""
SEGMENT_BYTES = 16 << 20
CONTENT_TYPE = "application/octet-stream"
CHECKSUM_HEADER = "x-amz-checksum-sha256"
"""The base64 of the sha-256 of a body. A URL for an upload is signed for it, the length and CONTENT_TYPE."""


@dataclass(frozen=True)
class PayloadUrls:
    """Where the payloads of one (stage, round) are or will be.

    Attributes:
        put: takes the caller's own payload; "" if it may upload none.
        gets: of the payloads that the caller has named, in that order.
    """

    put: str = field(default="", repr=False)
    gets: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class LendPayloads(Request[PayloadUrls | None]):
    """Answers None where the coordinator has no store.

    An own payload may be uploaded that is in the group of the round, while that round is not decided.
    """

    stage: int
    round_number: int
    sha256s: tuple[str, ...]


@dataclass(frozen=True)
class WantedUpload:
    """A part of the anchor after a round, which a member is to upload."""

    stage: int
    part: Part
    round_number: int


@dataclass(frozen=True)
class AskUploads(Request[tuple[WantedUpload, ...] | None]):
    """Answers what of the newest checkpoint the caller, and no other member, is to upload."""


@dataclass(frozen=True)
class LendSegment(Request[str | None]):
    """Answers a URL that takes a segment of such a part, of which there are `count`; "" if it is not wanted.

    The segments are the hashes of all chunks and then the chunks (protocol.math.digest), cut after each
    SEGMENT_BYTES.
    """

    wanted: WantedUpload
    index: int
    count: int
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class LendPart(Request[tuple[str, ...] | None]):
    """Answers URLs of all segments of a part; none where the store has not all of them."""

    wanted: WantedUpload


def distance(address: IPv4Address | IPv6Address) -> int | None:
    """How near an address is: 0 on the internet, 1 in a network around this machine, 2 this machine itself.

    None for addresses at which no store is: link-local ones, where clouds tell their machines secrets, and
    those of no single machine.
    """
    plain = getattr(address, "ipv4_mapped", None) or address
    if plain.is_link_local or plain.is_multicast or plain.is_unspecified:
        return None
    if plain.is_loopback:
        return 2
    return 0 if plain.is_global else 1
