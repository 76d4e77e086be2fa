"""Reads the files of tests/incidents, which `hetnode incident export` has written."""

from __future__ import annotations

import json
import lzma

from coordinator.ops.incident.file import FORMAT, Incident
from coordinator.store.event_codec import decode
from protocol.spec.run import RunSpec


def from_bytes(data: bytes) -> Incident:
    """The incident in the content of a file. Raises ValueError for another file."""
    head, *lines = map(json.loads, lzma.decompress(data).splitlines())
    if head["hetnode_incident"] != FORMAT or head["events"] != len(lines):
        raise ValueError("this is no whole incident of this format")
    events = tuple(decode(each["kind"], json.dumps(each["event"])) for each in lines)
    return Incident(RunSpec.from_json(json.dumps(head["spec"])), events, head["version"], head["why"])
