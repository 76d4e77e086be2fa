"""A node's standing with the coordinator: heartbeats, and the plans pushed to it."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from node.net.coordinator_client import CoordinatorClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Plan

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class Membership:
    """Keeps this node a member of the run while :meth:`keep` runs; other tasks ask it for plans.

    Losing the coordinator for a while is normal and only logged; being refused ends `keep`.

    Args:
        heartbeat: seconds between two heartbeats.
    """

    def __init__(self, coordinator: CoordinatorClient, heartbeat: float) -> None:
        self._coordinator, self._heartbeat = coordinator, heartbeat
        self._plans: dict[int, Plan] = {}
        self._changed = asyncio.Condition()
        self.progress = (0, 0)
        """(round, inner step) that heartbeats report."""

    async def keep(self) -> NoReturn:
        """Run until cancelled. Raises HetnodeError when the coordinator no longer knows this node."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._beat())
        raise AssertionError("membership tasks never end by themselves")

    async def plan(self, epoch: int | None = None) -> Plan:
        """The plan of `epoch` (None: the newest one), as soon as it is known."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._plans if epoch is None else epoch in self._plans)
            return self._plans[max(self._plans) if epoch is None else epoch]

    async def _watch(self) -> None:
        while True:
            try:
                async for news in self._coordinator.watch():
                    if news.plan is not None:
                        async with self._changed:
                            self._plans[news.plan.epoch] = news.plan
                            self._changed.notify_all()
                    elif news.waiting:
                        log.info("%s", news.waiting)
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                log.warning("%s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _beat(self) -> None:
        while True:
            try:
                await self._coordinator.heartbeat(*self.progress)
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                log.warning("%s", error)
            await asyncio.sleep(self._heartbeat)
