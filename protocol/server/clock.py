"""Clocks: one that no setting of this machine's clock changes, and how far the machine's own clock is off."""

from __future__ import annotations

import time
from collections.abc import Callable

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
NOTABLE_SECONDS = 2.0


def steady() -> float:
    """Seconds that go on while this machine sleeps, alike in all its processes; no setting changes them."""
    return time.clock_gettime(_CLOCK)


def steady_from(now: float) -> Callable[[], float]:
    """A clock that goes on steadily from `now`: it does not follow when this machine's clock is set."""
    ahead = now - steady()
    return lambda: steady() + ahead


def steady_wall_clock(not_before: float = 0.0) -> Callable[[], float]:
    """A clock that starts at the wall clock's time and then runs steadily.

    Stored times must continue across restarts, and must not jump when the wall clock is set.

    Args:
        not_before: the time of the newest stored event, and the earliest start of this clock. After the wall
            clock was set back, deadlines would otherwise wait for the difference.
    """
    offset = max(time.time(), not_before) - time.monotonic()
    return lambda: offset + time.monotonic()


def bound_by(begins: float, ends: float, now: float) -> float:
    """Seconds by which a clock that says `now` is at least ahead of the coordinator's; negative: behind.

    0 if the two may agree. The coordinator shows a certificate from `begins` to `ends`, and renews that in
    the first 0.6 of its life (coordinator.authority).
    """
    latest = begins + 0.6 * (ends - begins)
    return min(0.0, now - begins) or max(0.0, now - latest)


def off_text(ahead: float, at_least: str = "") -> str:
    """Such as ", which is at least 11.0 h ahead of the coordinator's"; "" for a clock that is right."""
    if abs(ahead) <= NOTABLE_SECONDS:
        return ""
    off = abs(ahead)
    text = f"{off:.0f} s" if off < 120 else f"{off / 60:.0f} min" if off < 7200 else f"{off / 3600:.1f} h"
    return f", which is {at_least}{text} {'ahead of' if ahead > 0 else 'behind'} the coordinator's"
