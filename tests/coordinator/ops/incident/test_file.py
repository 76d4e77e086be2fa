"""The file of an incident: what is written is read, and anything else is refused with its reason."""

from __future__ import annotations

import json
import lzma
from functools import cache

from coordinator.ops.incident.file import Incident, to_bytes
from coordinator.ops.incident.redaction import redacted_log, redacted_spec
from coordinator.store.event_codec import decode
from tests.builders import former_log, spec_of
from tests.support.incident_file import from_bytes


@cache
def incident() -> Incident:
    log = redacted_log([decode(*row) for row in former_log()])
    return Incident(redacted_spec(spec_of(2, 2, 1, 4)), log, "1.2.3", "a test")


@cache
def lines() -> list[bytes]:
    return lzma.decompress(to_bytes(incident())).splitlines(keepends=True)


def test_what_is_written_is_read() -> None:
    assert from_bytes(to_bytes(incident())) == incident()


def test_the_lines_are_json_that_people_can_read() -> None:
    first, second, *_ = map(json.loads, lines())
    assert first["why"] == "a test"
    assert first["events"] == len(incident().events) == len(lines()) - 1
    assert second["kind"] == type(incident().events[0]).__name__
