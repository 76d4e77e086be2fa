"""The payloads of a round as a member gets them: each is decoded once, for the screen and for the commit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from protocol.codec.payload import PayloadLayout, decode
from protocol.math.topk import SparseTensor


def sha256_of(payload: bytes) -> str:
    """The hash (hex) that names a payload."""
    return hashlib.sha256(payload).hexdigest()


class ReceivedPayloads:
    """The decoded payloads of one stage in the round that is open, by their hash."""

    def __init__(self, layout: PayloadLayout) -> None:
        self.layout = layout
        self._decoded: dict[str, Mapping[str, SparseTensor]] = {}

    def decoded(self, payload: bytes) -> Mapping[str, SparseTensor]:
        """The content. Raises HetnodeError PAYLOAD_CORRUPT, as protocol.codec.payload.decode does."""
        key = sha256_of(payload)
        if key not in self._decoded:
            self._decoded[key] = decode(self.layout, payload)
        return self._decoded[key]

    def clear(self) -> None:
        """Forget all: the round is decided."""
        self._decoded.clear()
