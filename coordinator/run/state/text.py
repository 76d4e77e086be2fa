"""Phrases that the messages of the coordinator share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protocol.types import PeerId, StageRange


class _HasStages(Protocol):
    @property
    def stages(self) -> StageRange: ...


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """`names` for a sentence: the first `most`, then the number of the others."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def short(peer: PeerId) -> str:
    """The end of a peer id, for sentences that name several peers: all peer ids begin alike."""
    return f"..{peer[-8:]}"


def stages_of(holder: _HasStages) -> str:
    """Such as "stage 1" or "stages 0-3"."""
    return f"{'stage' if len(holder.stages) == 1 else 'stages'} {holder.stages}"
