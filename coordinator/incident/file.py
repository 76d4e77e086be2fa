"""The file of an incident: a header and one line for each event, as JSON lines, compressed with xz.

``xzcat FILE | head`` shows it. A file may come from anybody: reading is bounded, and believes nothing.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.incident.pseudonyms import MOST_PEERS
from coordinator.incident.redaction import peers_in
from coordinator.state.event_codec import decode, encode
from coordinator.state.events import DecisionEvent, Event
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec

FORMAT = 1
SUFFIX = ".jsonl.xz"
MOST_FILE_BYTES = 64 << 20
MOST_TEXT_BYTES = 1 << 30
MOST_LINE_BYTES = 16 << 20
MOST_EVENTS = 5_000_000
_MEMORY_BYTES = 128 << 20
"""Of the decompressor. The largest of xz's usual settings needs half of it."""
_PIECE = 1 << 20


@dataclass(frozen=True)
class Incident:
    """A redacted log.

    Attributes:
        version: of the hetnode that wrote the file.
        why: what the exporter says about it.
    """

    spec: RunSpec
    events: tuple[Event, ...]
    version: str = ""
    why: str = ""

    @property
    def span(self) -> tuple[float, float]:
        """Unix times of the first and the last event; zeros without events."""
        return (self.events[0].at, self.events[-1].at) if self.events else (0.0, 0.0)


class _Header(BaseModel):
    """The first line."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    hetnode_incident: int
    version: str = Field(max_length=100)
    why: str = Field(max_length=10_000)
    events: int = Field(ge=0, le=MOST_EVENTS)
    peers: int = Field(ge=0, le=MOST_PEERS)
    first_at: float
    last_at: float
    spec: dict[str, object]


def to_bytes(incident: Incident) -> bytes:
    """The content of the file."""
    first, last = incident.span
    header = _Header(
        hetnode_incident=FORMAT,
        version=incident.version,
        why=incident.why,
        events=len(incident.events),
        peers=len(peers_in(incident.events)),
        first_at=first,
        last_at=last,
        spec=json.loads(incident.spec.canonical_json),
    )
    compressor = lzma.LZMACompressor(preset=6)
    parts = [compressor.compress(header.model_dump_json().encode() + b"\n")]
    for event in incident.events:
        kind, body = encode(event)
        parts.append(compressor.compress(f'{{"kind":"{kind}","event":{body}}}\n'.encode()))
    return b"".join([*parts, compressor.flush()])


def from_bytes(data: bytes) -> Incident:
    """The incident in the content of a file. Raises INCIDENT_UNREADABLE, which names the line."""
    lines = _lines(data)
    header = _header(next(lines, b""))
    spec = _spec(header)
    bounds = {
        **dict.fromkeys(("round_number", "from_round"), spec.rounds + 1),
        **dict.fromkeys(("stage", "first", "stop"), spec.swarm.stages),
    }
    events: list[Event] = []
    for number, line in enumerate(lines, start=2):
        if len(events) == header.events:
            raise _unreadable(f"it has more than the {header.events} events that its header names")
        event = _event(number, line)
        if not _is_within(event, bounds):
            raise _unreadable(f"line {number} names a round or a stage that the run does not have")
        events.append(event)
    if len(events) != header.events:
        raise _unreadable(f"it ends after {len(events)} of {header.events} events")
    if len(peers_in(events)) != header.peers:
        raise _unreadable(f"its events do not name the {header.peers} peers of its header")
    return Incident(spec, tuple(events), header.version, header.why)


def up_to_round(log: Sequence[Event], round_number: int) -> tuple[Event, ...]:
    """The beginning of `log`, with all decisions of `round_number` if it has them."""
    decisions = (
        number
        for number, event in enumerate(log, start=1)
        if isinstance(event, DecisionEvent) and event.decision.round_number <= round_number
    )
    return tuple(log[: max(decisions, default=0)])


def _header(line: bytes) -> _Header:
    try:
        tree = json.loads(line)
        number = tree["hetnode_incident"] if isinstance(tree, dict) else None
        if number != FORMAT and type(number) is int:
            raise _unreadable(f"it has format {number}, and this version reads format {FORMAT}")
        return _Header.model_validate_json(line)
    except (ValueError, KeyError, RecursionError):
        raise _unreadable("line 1 is not the header of an incident") from None


def _spec(header: _Header) -> RunSpec:
    try:
        return RunSpec.from_json(json.dumps(header.spec))
    except HetnodeError as error:
        raise _unreadable(f"line 1: {error.cause}") from None


def _event(number: int, line: bytes) -> Event:
    try:
        tree = json.loads(line)
        if (
            not isinstance(tree, dict)
            or tree.keys() != {"kind", "event"}
            or not isinstance(tree["kind"], str)
        ):
            raise _unreadable(f"line {number} is not an event")
        return decode(tree["kind"][:100], json.dumps(tree["event"]))
    except (ValueError, ValidationError, RecursionError) as error:
        raise _unreadable(f"line {number} is unreadable ({error!s:.200})") from None


def _is_within(value: object, bounds: Mapping[str, int]) -> bool:
    """Whether no field of `value` with one of these names is negative or beyond its bound."""
    if isinstance(value, tuple):
        return all(_is_within(each, bounds) for each in value)
    if not is_dataclass(value):
        return True
    for field in fields(value):
        found = getattr(value, field.name)
        if field.name in bounds and not 0 <= found <= bounds[field.name]:
            return False
        if not _is_within(found, bounds):
            return False
    return True


def _lines(data: bytes) -> Iterator[bytes]:
    """The lines without their ends. Nothing grows beyond a line and a piece of text."""
    if len(data) > MOST_FILE_BYTES:
        raise _unreadable(f"it has more than {MOST_FILE_BYTES >> 20} MiB")
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
    rest, total = b"", 0
    try:
        while not decompressor.eof:
            piece = decompressor.decompress(data if not total and not rest else b"", _PIECE)
            data = b""
            if not piece and decompressor.needs_input:
                raise _unreadable("its end is missing")
            total += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            if total > MOST_TEXT_BYTES or len(rest) > MOST_LINE_BYTES:
                raise _unreadable(
                    f"its text has more than {MOST_TEXT_BYTES >> 20} MiB, "
                    f"or a line more than {MOST_LINE_BYTES >> 20} MiB"
                )
            yield from lines
    except lzma.LZMAError as error:
        raise _unreadable(f"it is not compressed with xz, or damaged ({error})") from None
    if rest:
        raise _unreadable("its last line has no end")


def _unreadable(why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.INCIDENT_UNREADABLE,
        f"The incident cannot be read: {why}.",
        "Ask for the file again, as 'hetnode incident export' has written it.",
    )
