"""How much each event matters to those who read the log."""

from __future__ import annotations

import logging

from coordinator.run.state import events
from coordinator.run.state.events import Event

_WARNINGS = (
    events.AlarmRaised,
    events.AnchorDiverged,
    events.LinkFailed,
    events.PayloadArbitrated,
    events.PayloadRejected,
    events.PeerBanned,
    events.PeerLost,
    events.PeerQuarantined,
    events.PeerRetreated,
    events.PeerStruck,
    events.RoundAborted,
)
_DETAILS = (
    events.PayloadOffered,
    events.PayloadWithheld,
    events.HoldingsReported,
    events.ResultReported,
    events.DigestAttested,
    events.StageSkipped,
)


def log_level(event: Event) -> int:
    """The level of `event` in the log: a warning, something to know, or a detail."""
    if isinstance(event, _WARNINGS):
        return logging.WARNING
    return logging.DEBUG if isinstance(event, _DETAILS) else logging.INFO
