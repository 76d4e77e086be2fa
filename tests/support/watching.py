"""A run and a node that do what a test says, for the live view."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.home.guest.control import GuestState
from node.monitoring.report import NodeReport
from node.views.watch import Losses
from node.watch.sources import NodeLook
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import RunStatus

AWAY = HetnodeError(ErrorCode.COORDINATOR_UNREACHABLE, "The coordinator at h:1 does not answer.", "Check it.")


@dataclass
class ScriptedRun:
    """Tells `now`; an error is raised."""

    now: RunStatus | HetnodeError
    kept: RunStatus | None = None
    known: Losses = field(default_factory=dict)
    asked: int = 0
    is_closed: bool = False

    async def status(self) -> RunStatus:
        self.asked += 1
        if isinstance(self.now, HetnodeError):
            raise self.now
        return self.now

    async def stored(self) -> RunStatus | None:
        return self.kept

    async def losses(self) -> Losses:
        return self.known

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class ScriptedNode:
    """A node that trains; `calls` are the controls that were used. `trouble` is raised by every call."""

    report: NodeReport = field(default_factory=NodeReport)
    log: tuple[str, ...] = ()
    reason: str = ""
    trouble: HetnodeError | None = None
    calls: list[str] = field(default_factory=list)
    looks: int = 0

    async def look(self) -> NodeLook:
        self.looks += 1
        self._answer()
        return NodeLook(GuestState(not self.reason, self.reason, True, 0.0, 2), self.report, (), self.log)

    async def pause(self) -> None:
        self._answer("pause")
        self.reason = "it was paused by hand"

    async def resume(self) -> None:
        self._answer("resume")
        self.reason = ""

    async def leave(self) -> None:
        self._answer("leave")

    def _answer(self, call: str = "") -> None:
        if self.trouble is not None:
            raise self.trouble
        if call:
            self.calls.append(call)
