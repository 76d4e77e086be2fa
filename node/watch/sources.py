"""Where ``hetnode watch`` reads: the coordinator of a run, and the node of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from coordinator.store.log_copy import has_log, last_status
from node.home.guest.control import Ask, GuestState, ask, ask_for
from node.home.guest.sensors import Gpu, gpus
from node.monitoring.report import NodeReport, report_from
from node.net.coordinator_channel import CoordinatorChannel
from node.security.credentials import Credentials
from node.views.run_history import history_of, read_events
from node.views.watch import Losses
from protocol.errors import HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.status import RunStatus
from protocol.wire.status import status_from_pb

_ANSWER_SECONDS = 5.0
_LOOKS_PER_SENSORS = 5  # to ask a GPU's driver takes up to a second
_MOST_HISTORY_BYTES = 16 << 20


@dataclass(frozen=True)
class NodeLook:
    """One look at the node of this machine."""

    state: GuestState
    report: NodeReport
    gpus: tuple[Gpu, ...] = ()
    log: tuple[str, ...] = field(default=(), repr=False)


class RunSource(Protocol):
    """Tells the status of a run."""

    async def status(self) -> RunStatus:
        """The status now. Raises HetnodeError while the coordinator does not answer."""

    async def stored(self) -> RunStatus | None:
        """The status from the folder of the coordinator; None where that is not on this machine."""

    async def losses(self) -> Losses:
        """The losses so far, as far as this machine knows them."""

    async def close(self) -> None: ...


class NodeControl(Protocol):
    """The node of this machine. Each call raises HetnodeError if it does not answer."""

    async def look(self) -> NodeLook: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def leave(self) -> None:
        """Ask it to finish its round and to end."""


class CoordinatorSource:
    """Asks the coordinator over one connection, with new credentials after a failure.

    Args:
        find: address and credentials; raises HetnodeError.
        folder: of the coordinator, where it is on this machine.
    """

    def __init__(self, find: Callable[[], tuple[str, Credentials]], folder: Path | None) -> None:
        self._find, self._folder = find, folder
        self._channel: CoordinatorChannel | None = None

    async def status(self) -> RunStatus:
        if self._channel is None:
            self._channel = CoordinatorChannel(*self._find())
        try:
            async with self._channel.call() as stub:
                return status_from_pb(await stub.Status(pb.StatusRequest(), timeout=_ANSWER_SECONDS))
        except HetnodeError:
            await self.close()  # the credentials may have been renewed, or the address is another one
            raise

    async def stored(self) -> RunStatus | None:
        if self._folder is None or not has_log(self._folder):
            return None
        return await asyncio.to_thread(last_status, self._folder)

    async def losses(self) -> Losses:
        return (
            {}
            if self._folder is None
            else await asyncio.to_thread(_losses_in, self._folder / "metrics.jsonl")
        )

    async def close(self) -> None:
        if (channel := self._channel) is not None:
            self._channel = None
            await channel.close()


def _losses_in(path: Path) -> Losses:
    if not path.exists() or path.stat().st_size > _MOST_HISTORY_BYTES:
        return {}  # reading it would take long: the losses from now on are shown
    try:
        return {each.index: each.losses for each in history_of(read_events(path)).replicas}
    except (ValueError, KeyError, TypeError):
        return {}


class OwnNode:
    """The node that keeps `folder`, over its control socket. `folder` is absolute.

    Args:
        end: sends the node's process a signal, as ``hetnode leave`` does; raises HetnodeError.
    """

    def __init__(self, folder: Path, end: Callable[[], None]) -> None:
        self._folder, self._end = folder, end
        self._gpus, self._looks = tuple[Gpu, ...](), 0
        self._asking = asyncio.Lock()  # one at a time: the socket is opened from its folder

    async def look(self) -> NodeLook:
        async with self._asking:
            return await asyncio.to_thread(self._look)

    async def pause(self) -> None:
        await self._ask(Ask.PAUSE)

    async def resume(self) -> None:
        await self._ask(Ask.RESUME)

    async def leave(self) -> None:
        await asyncio.to_thread(self._end)

    async def _ask(self, question: Ask) -> None:
        async with self._asking:
            await asyncio.to_thread(ask, self._folder, question)

    def _look(self) -> NodeLook:
        state = ask(self._folder, Ask.STATE)
        if self._looks % _LOOKS_PER_SENSORS == 0:
            self._gpus = tuple(gpus())
        self._looks += 1
        report, lines = report_from(ask_for(self._folder, Ask.REPORT)), ask_for(self._folder, Ask.LOG)
        return NodeLook(state, report, self._gpus, tuple(map(str, lines)))
