"""The calls to other peers by which payloads are exchanged, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from node.exchange.arrivals import Arrival
from protocol.types import PayloadDescriptor


class PayloadCalls(Protocol):
    """Calls to other peers. A failed call may raise any exception."""

    async def fetch(
        self,
        holder: str,
        descriptor: PayloadDescriptor,
        when_asked: Callable[[], None],
        arrival: Arrival | None = None,
    ) -> bytes:
        """The payload, with the right length and hash. Raises WrongBytes if `holder` sent other bytes.

        Calls `when_asked` as soon as the request has been sent or has failed. `arrival` gets the bytes as
        they come.
        """

    async def push(self, listener: str, own: PayloadDescriptor, payload: bytes) -> None:
        """Send this peer's own payload to `listener`. Return when `listener` holds it."""
