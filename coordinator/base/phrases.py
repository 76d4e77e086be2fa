"""Phrases that the messages of the coordinator share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protocol.roles import POLICIES
from protocol.status import Cause, CauseCode
from protocol.types import PeerId, RunChange, StageRange


class _HasStages(Protocol):
    @property
    def stages(self) -> StageRange: ...


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """`names` for a sentence: the first `most`, then the number of the others."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


_MOST_TOLD = 200
"""Characters of a setting: a mixture may have thousands."""


def change_text(change: RunChange) -> str:
    """Such as "inner.steps=20 from round 8 on: links are slow"."""
    why = f": {change.reason}" if change.reason else ""
    told = [each if len(each) <= _MOST_TOLD else f"{each[:_MOST_TOLD]}..." for each in change.settings]
    return f"{listed(told)} from round {change.from_round} on{why}"


def short(peer: PeerId) -> str:
    """The end of a peer id, for sentences that name several peers: all peer ids begin alike."""
    return f"..{peer[-8:]}"


def stages_of(holder: _HasStages) -> str:
    """Such as "stage 1" or "stages 0-3"."""
    return f"{'stage' if len(holder.stages) == 1 else 'stages'} {holder.stages}"


def stages_text(stages: Sequence[int]) -> str:
    """Such as "stage 1" or "stages 0-3"."""
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"


def lacking_text(lacks: Sequence[Cause]) -> str:
    """Such as "1 more stage peer (1 of 2 here) and 1 more full replica (0 of 1 here)"; "" for none."""
    parts = []
    for each in lacks:
        assert each.role is not None
        noun = POLICIES[each.role].noun
        parts.append(
            f"{counted(each.count, f'more {noun}')} ({each.total - each.count} of {each.total} here)"
        )
    return " and ".join(parts)


def member_text(cause: Cause) -> str:
    """The member of a MEMBER cause and why it cannot train, such as "..Qm (stage 1), which is gone"."""
    match cause.code:
        case CauseCode.MEMBER_GONE:
            why = "is paused on its machine" if cause.detail else "is gone"
        case CauseCode.MEMBER_DRAINS:
            why = "drains"
        case CauseCode.MEMBER_RESTS:
            why = f"rests until round {cause.round_number} after {cause.count} failures"
        case _:
            why = "must catch up"
    return f"{short(cause.peers[0])} ({stages_text(cause.stages)}), which {why}"
