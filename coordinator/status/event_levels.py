"""How much each event matters to those who read the log."""

from __future__ import annotations

import logging

from coordinator.run.state import events
from coordinator.run.state.events import Event
from protocol.types import Aborted, Committed, Decision, RolledBack, Skipped

_WARNINGS = (
    events.AlarmRaised,
    events.AnchorDiverged,
    events.LinkFailed,
    events.PayloadArbitrated,
    events.PayloadRejected,
    events.PeerBanned,
    events.PeerLost,
    events.PeerQuarantined,
    events.PeerWeighed,
    events.PeerRetreated,
    events.PeerStruck,
)
_DETAILS = (
    events.PayloadOffered,
    events.PayloadWithheld,
    events.HoldingsReported,
    events.ResultReported,
    events.DigestAttested,
    events.ModelEvaluated,
    events.PlaceAsked,
)
_DECISIONS: dict[type[Decision], int] = {
    Committed: logging.INFO,
    Aborted: logging.WARNING,
    RolledBack: logging.WARNING,
    Skipped: logging.DEBUG,
}


def log_level(event: Event) -> int:
    """The level of `event` in the log: a warning, something to know, or a detail."""
    if isinstance(event, events.RoundDecided):
        return _DECISIONS[type(event.decision)]
    if isinstance(event, _WARNINGS):
        return logging.WARNING
    return logging.DEBUG if isinstance(event, _DETAILS) else logging.INFO
