"""Which member uploads which part of an anchor, so that newcomers need no uplink of a home. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coordinator.ops.objects.keys import round_prefix
from coordinator.run.rounds.attestation import locate
from coordinator.run.state.state import State
from protocol.types import Part, PeerId
from protocol.wire.object_calls import WantedUpload

_SECONDS_TO_UPLOAD = 900.0
"""After which it is another member's turn, if the store has not all of a part."""


def newest_parts(state: State, in_store: Collection[WantedUpload]) -> dict[WantedUpload, tuple[PeerId, ...]]:
    """The parts of the newest checkpoint that the store lacks: who has them, the fastest uplink first."""
    found = {}
    named = [(stage, Part.STAGE) for stage in range(state.stages)]
    for stage, part in (*named, *([(0, Part.EMBEDDING)] if state.stages > 1 else ())):
        record = next((each for each in locate(state, stage, part) if each.round_number), None)
        if record is None or (wanted := WantedUpload(stage, part, record.round_number)) in in_store:
            continue
        found[wanted] = tuple(sorted(record.holders, key=lambda peer: (-_uplink(state, peer), peer)))
    return found


def _uplink(state: State, peer: PeerId) -> float:
    told = state.estimates.get(peer)
    return (state.peers[peer].capacity if told is None else told.capacity).uplink


def uploader(holders: tuple[PeerId, ...], began: float, now: float) -> PeerId:
    """The one of `holders` that uploads a part at `now`, if it was first wanted at `began`."""
    return holders[int((now - began) / _SECONDS_TO_UPLOAD) % len(holders)]


def segment_key(run: str, wanted: WantedUpload, peer: PeerId, index: int, count: int) -> str:
    where = f"{round_prefix(run, wanted.round_number)}anchors/{wanted.stage:03d}-{wanted.part.value}"
    return f"{where}/{peer}/{index:05d}-{count:05d}"


def whole_parts(run: str, keys: Iterable[str]) -> dict[WantedUpload, list[str]]:
    """The parts of which the store has all segments from one member, and their keys in order."""
    by_upload: dict[str, list[str]] = {}
    for key in sorted(keys):
        if "/anchors/" in key:
            by_upload.setdefault(key.rpartition("/")[0], []).append(key)
    found = {}
    for its_keys in by_upload.values():
        _, number, _, what, peer, _ = its_keys[-1].split("/")
        stage, _, part = what.partition("-")
        wanted = WantedUpload(int(stage), Part(part), int(number[len("round-") :]))
        count = len(its_keys)
        if its_keys == [segment_key(run, wanted, PeerId(peer), each, count) for each in range(count)]:
            found[wanted] = its_keys
    return found
