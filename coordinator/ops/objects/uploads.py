"""Which member uploads which part of an anchor, so that newcomers need no uplink of a home. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from coordinator.ops.objects.keys import round_prefix
from coordinator.run.rounds.attestation import locate
from coordinator.run.state.state import State
from protocol.types import Part, PeerId
from protocol.wire.object_calls import WantedUpload

_SEGMENT = re.compile(
    r"[^/]+/round-(?P<round>\d+)/anchors/(?P<stage>\d+)-(?P<part>stage|embedding)/(?P<peer>\w+)/\d+-\d+"
)
_SECONDS_TO_UPLOAD = 900.0
"""After which it is another member's turn, if the store has not all of a part."""


def newest_parts(state: State, in_store: Collection[WantedUpload]) -> dict[WantedUpload, tuple[PeerId, ...]]:
    """The parts of the newest checkpoint that the store lacks: who has them, the fastest uplink first.

    Strangers whose payloads do not count yet upload nothing: uplinks are what peers tell.
    """
    found = {}
    named = [(stage, Part.STAGE) for stage in range(state.stages)]
    for stage, part in (*named, *([(0, Part.EMBEDDING)] if state.stages > 1 else ())):
        record = next((each for each in locate(state, stage, part) if each.round_number), None)
        if record is None or (wanted := WantedUpload(stage, part, record.round_number)) in in_store:
            continue
        holders = (peer for peer in record.holders if not state.is_unproven(peer))
        found[wanted] = tuple(sorted(holders, key=lambda peer: (-_uplink(state, peer), peer)))
    return found


def _uplink(state: State, peer: PeerId) -> float:
    told = state.estimates.get(peer)
    return (state.peers[peer].capacity if told is None else told.capacity).uplink


def uploader(holders: tuple[PeerId, ...], began: float, now: float) -> PeerId | None:
    """The one of `holders`, if there are any, that uploads at `now` what is wanted since `began`."""
    return holders[int((now - began) / _SECONDS_TO_UPLOAD) % len(holders)] if holders else None


def segment_key(run: str, wanted: WantedUpload, peer: PeerId, index: int, count: int) -> str:
    where = f"{round_prefix(run, wanted.round_number)}anchors/{wanted.stage:03d}-{wanted.part.value}"
    return f"{where}/{peer}/{index:05d}-{count:05d}"


def whole_parts(run: str, keys: Iterable[str]) -> dict[WantedUpload, list[str]]:
    """The parts of which the store has all segments from one member, and their keys in order."""
    by_upload: dict[tuple[WantedUpload, PeerId], list[str]] = {}
    for key in sorted(keys):
        if found := _SEGMENT.fullmatch(key):
            wanted = WantedUpload(int(found["stage"]), Part(found["part"]), int(found["round"]))
            by_upload.setdefault((wanted, PeerId(found["peer"])), []).append(key)
    return {
        wanted: its_keys
        for (wanted, peer), its_keys in by_upload.items()
        if its_keys == [segment_key(run, wanted, peer, each, len(its_keys)) for each in range(len(its_keys))]
    }
