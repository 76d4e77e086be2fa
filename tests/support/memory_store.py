"""The event log in memory. It encodes events as the file does, so tests also check the stored form."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from coordinator.run.state.events import Event
from coordinator.store.event_chain import first_hash, next_hash
from coordinator.store.event_codec import decode, encode
from coordinator.store.store import StoredRow
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Decision
from tests.builders import decisions_in


class MemoryStore:
    """A log that outlives the coordinator under test."""

    blocks = False

    def __init__(self) -> None:
        self._spec: str | None = None
        self._log: list[tuple[str, str]] = []
        self._hashes = [b""]

    @property
    def end(self) -> tuple[int, bytes]:
        return len(self._log), self._hashes[-1]

    def row_hash(self, sequence: int) -> bytes | None:
        return self._hashes[sequence] if 0 <= sequence < len(self._hashes) else None

    def load(self) -> tuple[str | None, tuple[Event, ...]]:
        return self._spec, tuple(decode(kind, body) for kind, body in self._log)

    def verify(self) -> str | None:
        return self._spec

    def events(self) -> Iterator[Event]:
        return iter(self.load()[1])

    def begin(self, spec_json: str) -> None:
        if self._spec is not None:
            raise HetnodeError(ErrorCode.STORE_CORRUPT, "The run has begun already.", "Use another store.")
        self._spec, self._hashes = spec_json, [first_hash(spec_json)]

    def append(self, events: Sequence[Event]) -> None:
        for kind, body in [encode(event) for event in events]:  # all or none
            self._log.append((kind, body))
            self._hashes.append(next_hash(self._hashes[-1], kind, body))

    def append_rows(self, rows: Sequence[StoredRow]) -> Sequence[Event]:
        events = [decode(kind, body.decode()) for kind, body in rows]
        self.append(events)
        return events

    def rows_after(self, sequence: int, most_bytes: int) -> list[StoredRow]:
        return [(kind, body.encode()) for kind, body in self._log[sequence : sequence + 50]]

    def read(self, first: int, last: int, kinds: Collection[type[Event]] = ()) -> list[tuple[int, Event]]:
        rows = enumerate(self._log[max(0, first - 1) : max(0, last)], start=max(1, first))
        found = [(number, decode(kind, body)) for number, (kind, body) in rows]
        return [each for each in found if not kinds or isinstance(each[1], tuple(kinds))]

    def decision(self, stage: int, round_number: int) -> Decision | None:
        decided = decisions_in(self.events())
        key = stage, round_number
        return next((each for each in decided if (each.stage, each.round_number) == key), None)

    def close(self) -> None:
        pass
