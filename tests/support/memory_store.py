"""The event log in memory. It encodes events as the file does, so tests also check the stored form."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.state.event_codec import decode, encode
from coordinator.state.events import Event
from protocol.errors import ErrorCode, HetnodeError


class MemoryStore:
    """A log that outlives the coordinator under test."""

    blocks = False

    def __init__(self) -> None:
        self._spec: str | None = None
        self._log: list[tuple[str, str]] = []

    def load(self) -> tuple[str | None, tuple[Event, ...]]:
        return self._spec, tuple(decode(kind, body) for kind, body in self._log)

    def begin(self, spec_json: str) -> None:
        if self._spec is not None:
            raise HetnodeError(ErrorCode.STORE_CORRUPT, "The run has begun already.", "Use another store.")
        self._spec = spec_json

    def append(self, events: Sequence[Event]) -> None:
        self._log += [encode(event) for event in events]

    def close(self) -> None:
        pass
