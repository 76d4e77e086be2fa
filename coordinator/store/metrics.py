"""``metrics.jsonl``: one JSON object per line, for plots and statistics."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.run.state import events
from coordinator.run.state.events import Event
from protocol.status import Measurement, PayloadAgreement, fields_of
from protocol.types import Committed, PeerId, Skipped, entries_of

log = logging.getLogger(__name__)

NEWEST_BYTES = 1 << 23
"""Of 100 members, 50 rounds and more."""


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """Appends to the file at `path`; every line is flushed. Use as a context manager.

    If a killed process has left an incomplete last line, that line is removed. A line that a full disk does
    not take is lost.

    Attributes:
        path, size: of the file; the size is in bytes.
        on_measurement: called with each measurement that was recorded, its time, and `size` after it.
        newest: the newest measurement of each member, of those that were recorded here.
        peer_changes: lines about peers that were recorded here, by change.
    """

    def __init__(self, path: Path) -> None:
        self.on_measurement: Callable[[float, Measurement, int], None] = lambda *_: None
        self.newest: dict[PeerId, Measurement] = {}
        self.peer_changes: Counter[str] = Counter()
        self.path = path
        self._file = path.open("ab", buffering=0)
        self.size = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(self.size)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, at: float, event: str, fields: Mapping[str, Any]) -> None:
        """Add ``{"time": at, "event": event, **fields}``. NaN and infinities become null: JSON has none."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        try:
            self.append((json.dumps({"time": round(at, 3), "event": event, **finite}) + "\n").encode())
        except OSError as error:
            log.warning("a line of %s is lost: %s", self.path, error)

    def append(self, lines: bytes) -> None:
        """Add whole lines, all or none. Raises OSError."""
        try:
            written = self._file.write(lines)
            if written < len(lines):
                raise OSError(errno.ENOSPC, "the disk takes a part of a line")
        except OSError:
            self._file.truncate(self.size)  # the first bytes of a line may be all that a full disk takes
            raise
        self.size += written

    def lines_from(self, begin: int, most: int) -> bytes:
        """Whole lines from byte `begin` on, at most `most` bytes; none behind the last. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(begin)
            found = file.read(max(0, min(most, self.size - begin)))
        return found[: found.rfind(b"\n") + 1]

    def record_measurement(self, at: float, measurement: Measurement) -> None:
        """Add a line with the fields of `measurement`, unless its peer has measured that round before."""
        former = self.newest.get(measurement.peer)
        if former is None or former.round_number < measurement.round_number:
            # What is told of others' payloads would make a status grow with stages times peers.
            self.newest[measurement.peer] = replace(measurement, agreements=())
            self.write(at, "measurement", fields_of(measurement))
            self.on_measurement(round(at, 3), measurement, self.size)  # as the line has it

    def record(self, event: Event) -> None:
        """Add a line for `event`, unless its kind has none."""
        if (line := _line(event)) is not None:
            self.write(event.at, *line)
            self.peer_changes.update([line[1]["change"]] if line[0] == "peer" else ())


def read_measurements(path: Path, begin: int, end: int) -> Iterator[tuple[float, Measurement, int]]:
    """Time and measurement of each such line between two positions in the file, and where its line ends.

    A line that is no measurement of this version is left out. Raises OSError.
    """
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (line := file.readline()).endswith(b"\n"):
            begin += len(line)
            if b'"event": "measurement"' in line and (found := _measurement(line)) is not None:
                yield *found, begin


def newest_measurements(path: Path, end: int) -> Iterator[Measurement]:
    """Those of the last lines before the position `end`: of some rounds, as many as NEWEST_BYTES hold."""
    for _, measurement, _ in read_measurements(path, max(0, end - NEWEST_BYTES), end):
        yield measurement


def newest_in(path: Path) -> dict[PeerId, Measurement]:
    """The newest measurement of each member in the last lines of the file, if it is there."""
    with suppress(OSError):
        found = newest_measurements(path, path.stat().st_size)
        # The agreements that a member reports about the payloads of others are shown nowhere.
        return {measured.peer: replace(measured, agreements=()) for measured in found}
    return {}


def _measurement(line: bytes) -> tuple[float, Measurement] | None:
    try:
        fields = json.loads(line)
        known: dict[str, Any] = {
            # What is not finite was written as null.
            field.name: math.nan if value is None else value
            for field in dataclasses.fields(Measurement)
            if (value := fields.get(field.name.removesuffix("_number"), field.default)) != field.default
        }
        known["agreements"] = tuple(PayloadAgreement(**each) for each in known.get("agreements", ()))
        return float(fields["time"]), Measurement(**known)
    except (ValueError, TypeError, KeyError):
        return None


_PEERS: dict[type[Event], tuple[str, ...]] = {
    events.PeerJoined: ("joined", "role"),
    events.RoleChanged: ("role", "role", "reason"),
    events.PeerLeft: ("left", "reason"),
    events.PeerLost: ("lost", "silent_seconds"),
    events.PeerRetreated: ("retreated", "epoch", "reason"),
    events.PeerBanned: ("banned", "reason"),
    events.PeerStruck: ("strike", "round_number", "reason"),
    events.PeerWeighed: ("weighed", "round_number", "counts", "score"),
    events.PeerQuarantined: ("quarantined", "strikes"),
}
"""Of events about one peer: what has changed, and the fields that their lines have."""
_RUN: dict[type[Event], tuple[str, ...]] = {
    events.AnchorDiverged: ("diverged", "peer", "stage", "round_number", "part", "digest", "expected"),
    events.AlarmRaised: ("alarm", "round_number", "last_healthy", "reason"),
    events.RunFinished: ("finished",),
}
"""Of other events: the name of the line, and its fields."""
PEER_CHANGES = tuple(change for change, *_ in _PEERS.values())
"""What a line about a peer may say."""


def _line(event: Event) -> tuple[str, dict[str, Any]] | None:
    """The name of the line of `event` and its fields; None without a line."""
    if type(event) in _PEERS:
        change, *names = _PEERS[type(event)]
        return "peer", {**_fields(event, ["peer"]), "change": change, **_fields(event, names)}
    if type(event) in _RUN:
        name, *names = _RUN[type(event)]
        return name, _fields(event, names)
    match event:
        case events.RoundDecided(decision=decision) if not isinstance(decision, Skipped):
            payloads = [entry.descriptor for entry in entries_of(decision)]
            return "decision", {
                "committed": isinstance(decision, Committed),
                **_fields(decision, ["stage", "round_number", "next_epoch", "reason"]),
                "owners": [each.owner for each in payloads],
                "payload_bytes": sum(each.nbytes for each in payloads),
            }
        case events.ModelEvaluated(evaluation=told) if told.figures:
            return "evaluation", _fields(told, ["peer", "round_number", "name", "figures"])
        case events.PlanAdopted(plan=plan):
            replicas = {each.name: [member.peer for member in each.members] for each in plan.replicas}
            names = ["epoch", "from_round", "first_sample", "reason"]
            return "plan", {**_fields(plan, names), "replicas": replicas}
    return None


def _fields(record: object, names: Iterable[str]) -> dict[str, Any]:
    return {name.removesuffix("_number"): getattr(record, name) for name in names}
