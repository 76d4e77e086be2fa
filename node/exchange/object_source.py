"""Where a transport gets URLs of an object store from, which is one more source beside the peers."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.types import ExchangeGroup, PayloadDescriptor, StateRecord
from protocol.wire.object_calls import PayloadUrls


@dataclass(frozen=True)
class LentPayloads:
    """The objects of one exchange.

    Attributes:
        sha256s: of the payloads whose URLs are in `urls`, in that order.
        nearest: the nearest place that a URL may lead to (protocol.wire.object_calls.distance).
    """

    sha256s: tuple[str, ...]
    urls: PayloadUrls
    nearest: int

    def get_url(self, sha256: str) -> str:
        """Where that payload is or will be; "" if that is not known."""
        return self.urls.gets[self.sha256s.index(sha256)] if sha256 in self.sha256s else ""


@dataclass(frozen=True)
class LentPart:
    """The segments of a part of an anchor, and the nearest place that their URLs may lead to."""

    urls: tuple[str, ...] = field(repr=False)
    nearest: int


class ObjectSource:
    """What a node may know of the store of its run; this one knows of none, and always answers None.

    No method raises; each takes some seconds at most.
    """

    async def of_exchange(self, own: PayloadDescriptor, group: ExchangeGroup) -> LentPayloads | None:
        """For the own payload and those of the other members of a group."""

    async def of_payload(self, wanted: PayloadDescriptor) -> LentPayloads | None:
        """For one committed payload."""

    async def of_part(self, record: StateRecord) -> LentPart | None:
        """For one part of an anchor."""


NO_OBJECTS = ObjectSource()
