"""Whether others need the machine: its keyboard, its CPU, its GPU. What cannot be known counts as no.

:func:`busy_reason` and :class:`IdleRule` decide; :mod:`node.home.guest.presence` looks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from node.home.guest.guest import Rest

log = logging.getLogger(__name__)

CPU_SHARE, GPU_SHARE = 0.25, 0.1
"""Shares of all cores, and of a GPU, above which the other processes of the machine need it."""
QUIET_SECONDS = 300.0
"""How long nothing may have needed the machine before the node takes part again."""
_PATIENCE_SECONDS = 10.0  # someone waits for the machine: the round is not finished first


@dataclass(frozen=True)
class Presence:
    """What others do on this machine now; None where that cannot be known.

    Attributes:
        at_keyboard: whether someone uses it.
        cpu, gpu: shares, from 0 to 1, that processes of others use; of the busiest GPU.
    """

    at_keyboard: bool | None = None
    cpu: float | None = None
    gpu: float | None = None


def busy_reason(presence: Presence) -> str:
    """Why the machine is needed, as the end of a sentence; "" if it is not, as far as that is known."""
    if presence.at_keyboard:
        return "someone uses this machine"
    if presence.gpu is not None and presence.gpu > GPU_SHARE:
        return f"other processes use {presence.gpu:.0%} of the GPU"
    if presence.cpu is not None and presence.cpu > CPU_SHARE:
        return f"other processes use {presence.cpu:.0%} of the CPU"
    return ""


def unknown(presence: Presence) -> str:
    """A sentence that names what cannot be known here; "" if nothing."""
    named = {
        "whether someone is at the keyboard": presence.at_keyboard,
        "what others do with the GPU": presence.gpu,
        "what others do with the CPU": presence.cpu,
    }
    lacking = [what for what, value in named.items() if value is None]
    return f"--idle-only: this machine does not tell {' and '.join(lacking)}" if lacking else ""


class IdleRule:
    """Lets the node take part while others do not need the machine, and have not for `quiet` seconds.

    Before the first time that they need it, no quiet time is asked for. A load of the CPU or GPU counts when
    two looks in a row see it, because a short one passes before the node has left.

    Args:
        look: the present state of the machine; may take a second.
        now: seconds, never decreasing.
    """

    def __init__(
        self, look: Callable[[], Presence], now: Callable[[], float], quiet: float = QUIET_SECONDS
    ) -> None:
        self._look, self._now, self._quiet = look, now, quiet
        self._busy_at: float | None = None
        self._was_loaded = False
        self._reason = ""
        if sentence := unknown(look()):
            log.warning("%s", sentence)

    def rest(self) -> Rest | None:
        presence = self._look()
        reason = busy_reason(presence)
        is_new = reason and self._busy_at is None
        if is_new and not presence.at_keyboard and not self._was_loaded:
            self._was_loaded = True
            return None
        self._was_loaded = False
        if reason:
            # The text of the first moment: a share that changes is no news.
            self._reason = self._reason if self._busy_at is not None else reason
            self._busy_at = self._now()
        elif self._busy_at is not None and self._now() >= self._busy_at + self._quiet:
            self._busy_at = None
        if self._busy_at is None:
            return None
        return Rest(self._reason, _PATIENCE_SECONDS)
