"""Tells the log and the watchers what the run does or waits for, which may change with time alone."""

from __future__ import annotations

import logging
from collections.abc import Collection
from math import inf

from coordinator.run.command_loop import RUN_TOPIC, CommandLoop
from coordinator.status.messages import run_message, stall_message
from protocol.types import PeerId

log = logging.getLogger(__name__)

STALL_UPDATES_PER_SECOND = 200.0
"""Updates about why the run waits, to all watchers together."""
_LEAST_STALL_PAUSE = 0.1


class RunNews:
    """The news of the run of `command_loop`, which looks for them after each of its ticks.

    `resting` holds the peers whose processes rest, as they are at each moment.
    """

    def __init__(self, command_loop: CommandLoop, resting: Collection[PeerId] = ()) -> None:
        self._command_loop, self._resting = command_loop, resting
        self._message = ""
        self._stall, self._told_stall_at, self._woken_for = "", -inf, ""
        command_loop.after_tick.append(self.look)

    def look(self) -> None:
        """Log the message of the run if it has changed; wake the watchers if it waits for another reason."""
        message = run_message(self._command_loop.state, self._resting)
        if message != self._message:
            self._message = message
            log.info("%s", message)
        if self.stall() != self._woken_for:
            self._woken_for = self._stall
            self._command_loop.wake(RUN_TOPIC)

    def stall(self) -> str:
        """Why the run waits, as watchers are to be told; of a large swarm not always the newest."""
        state, now = self._command_loop.state, self._command_loop.now()
        # While many peers join, it changes with each of them, and each change concerns them all.
        pause = len(state.peers) / STALL_UPDATES_PER_SECOND
        if pause < _LEAST_STALL_PAUSE or now >= self._told_stall_at + pause:
            stall = stall_message(state, self._resting)
            if stall != self._stall:
                self._stall, self._told_stall_at = stall, now
        return self._stall
