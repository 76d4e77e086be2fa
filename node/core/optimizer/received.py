"""The payloads of a round as a member gets them: each is decoded once, for the screen and for the commit."""

from __future__ import annotations

from collections.abc import Mapping

from node.ipc.stored_payload import Payload, StoredPayload, name_of
from protocol.codec.payload import decode
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import SparseTensor


class ReceivedPayloads:
    """The decoded payloads of one stage in the round that is open, by their hash."""

    def __init__(self, layout: PayloadLayout) -> None:
        self.layout = layout
        self._decoded: dict[str, Mapping[str, SparseTensor]] = {}
        self._own: dict[str, bytes] = {}

    def expect(self, own: bytes) -> None:
        """Know the payload that was made here: nothing else has to have its bytes."""
        self._own = {name_of(own): own}

    def holds(self, payload: Payload) -> bool:
        """Whether the payload is decoded, so that nothing can go wrong with it any more."""
        return name_of(payload) in self._decoded

    def decoded(self, payload: Payload) -> Mapping[str, SparseTensor]:
        """The content of a payload, whose size and hash are checked before it is decoded.

        Raises HetnodeError PAYLOAD_CORRUPT, as protocol.codec.payload.decode does; PAYLOAD_UNAVAILABLE where
        the file of a stored payload has no longer what was stored.
        """
        name = name_of(payload)
        if name not in self._decoded:
            data = self._own.get(name, payload)
            if isinstance(data, StoredPayload):
                data = data.read(self.layout.nbytes)
            self._decoded[name] = decode(self.layout, data)
        return self._decoded[name]

    def clear(self) -> None:
        """Forget all: the round is decided."""
        self._decoded.clear()
        self._own.clear()
