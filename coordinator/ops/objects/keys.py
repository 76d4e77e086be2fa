"""The names of objects, and which of them are old. Pure."""

from __future__ import annotations

import re

from protocol.spec.run import RunSpec

_ROUND = re.compile(r"round-(\d{6,})/")


def round_prefix(run: str, round_number: int) -> str:
    """What the keys of all objects of a round of `run` begin with, below the prefix of the operator."""
    return f"{run}/round-{round_number:06d}/"


def payload_key(run: str, stage: int, round_number: int, sha256: str) -> str:
    return f"{round_prefix(run, round_number)}payloads/{stage:03d}/{sha256}"


def round_of(run: str, key: str) -> int | None:
    """The round of an object of `run`. None for any other object, which is never removed."""
    name, _, rest = key.partition("/")
    found = _ROUND.match(rest) if name == run else None
    return int(found[1]) if found else None


def oldest_round(spec: RunSpec, current_round: int) -> int:
    """The first round whose objects stay: a peer may go on from the last checkpoint but one."""
    return current_round - 2 * spec.recovery.checkpoint_every - 2
