"""Where calls of members come from."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.types import PeerId


@dataclass(frozen=True)
class MemberSource:
    """A source from which calls of `peer` have come: an IPv4 address or an IPv6 /64, as text."""

    peer: PeerId
    source: str
