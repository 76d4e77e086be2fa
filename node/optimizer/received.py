"""The payloads of a round as a member gets them: each is decoded once, from the screen to the commit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.algorithm.topk import SparseTensor
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.payload_codec import PayloadLayout, decode


@dataclass(frozen=True)
class PayloadFile:
    """A payload on the disk of this node, whose sha-256 (hex) the reader checks again."""

    path: Path
    sha256: str

    def read(self, nbytes: int) -> bytes:
        """The bytes, of which there must be `nbytes`. Raises HetnodeError PAYLOAD_CORRUPT."""
        try:
            with self.path.open("rb") as file:
                data = file.read(nbytes + 1)
        except OSError as error:
            raise _changed(f"{self.path} cannot be read: {error.strerror or error}") from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise _changed(f"{self.path} has changed")
        return data


Payload = bytes | PayloadFile
"""The bytes of a payload, or where they are."""


def sha256_of(payload: Payload) -> str:
    """The hash (hex) that names a payload."""
    return payload.sha256 if isinstance(payload, PayloadFile) else hashlib.sha256(payload).hexdigest()


class ReceivedPayloads:
    """The decoded payloads of one stage in the round that is open, by their hash."""

    def __init__(self, layout: PayloadLayout) -> None:
        self.layout = layout
        self._decoded: dict[str, Mapping[str, SparseTensor]] = {}

    def decoded(self, payload: Payload) -> Mapping[str, SparseTensor]:
        """The content. Raises HetnodeError PAYLOAD_CORRUPT, as protocol.wire.payload_codec.decode does."""
        key = sha256_of(payload)
        if key not in self._decoded:
            data = payload.read(self.layout.nbytes) if isinstance(payload, PayloadFile) else payload
            self._decoded[key] = decode(self.layout, data)
        return self._decoded[key]

    def clear(self) -> None:
        """Forget all: the round is decided."""
        self._decoded.clear()


def _changed(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.PAYLOAD_CORRUPT,
        f"A payload cannot be used: {cause}.",
        "The node fetches it again. If this happens often, check the disk of this machine.",
    )
