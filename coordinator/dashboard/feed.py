"""The newest events of the run, as lines for people."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from coordinator.dashboard.text import shown
from coordinator.state import events
from coordinator.state.events import Event
from coordinator.status.event_levels import log_level
from coordinator.status.messages import event_message

_MOST_LINES = 60
_OF_EVERY_ROUND = (events.GroupClosed, events.RoundCommitted, events.PeerMeasured)


@dataclass(frozen=True)
class _Noted:
    event: Event
    is_warning: bool


class Feed:
    """Keeps the newest events. :meth:`note` is for the coordinator's thread, :meth:`lines` for others."""

    def __init__(self) -> None:
        self._noted: deque[_Noted] = deque(maxlen=_MOST_LINES)

    def note(self, event: Event) -> None:
        """Keep `event` if people should see it: if the log shows it, and every round has not several."""
        level = log_level(event)
        if level >= logging.INFO and not isinstance(event, _OF_EVERY_ROUND):
            self._noted.append(_Noted(event, level >= logging.WARNING))

    def lines(self) -> list[dict[str, Any]]:
        """The newest first: Unix time, sentence, and whether it is a warning."""
        return [
            {"at": each.event.at, "text": shown(event_message(each.event)), "warning": each.is_warning}
            for each in reversed(tuple(self._noted))
        ]
