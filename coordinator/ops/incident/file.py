"""The file of an incident: a header and one line for each event, as JSON lines, compressed with xz.

``xzcat FILE | head`` shows it.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass

from coordinator.ops.incident.redaction import peers_in
from coordinator.run.state.events import Event
from coordinator.store.event_codec import encode
from protocol.spec.run import RunSpec

FORMAT = 1


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


def to_bytes(incident: Incident) -> bytes:
    """The content of the file."""
    first, last = incident.span
    header = {
        "hetnode_incident": FORMAT,
        "version": incident.version,
        "why": incident.why,
        "events": len(incident.events),
        "peers": len(peers_in(incident.events)),
        "first_at": first,
        "last_at": last,
        "spec": json.loads(incident.spec.canonical_json),
    }
    compressor = lzma.LZMACompressor(preset=6)
    parts = [compressor.compress(json.dumps(header, separators=(",", ":")).encode() + b"\n")]
    for kind, body in map(encode, incident.events):
        parts.append(compressor.compress(f'{{"kind":"{kind}","event":{body}}}\n'.encode()))
    return b"".join([*parts, compressor.flush()])
