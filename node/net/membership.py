"""A node's standing with the coordinator: heartbeats, and the plans and bans pushed to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import NoReturn

from node.net.coordinator_client import CoordinatorClient, PlanNews
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId, Plan

log = logging.getLogger(__name__)

Admit = Callable[[Set[PeerId], Set[PeerId]], Awaitable[None]]
"""Told who has a place in the run and who is banned."""

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
        self._banned: frozenset[PeerId] = frozenset()
        self._admit: Admit | None = None
        self._adopting = asyncio.Lock()
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

    async def attach(self, admit: Admit) -> None:
        """From now on `admit` hears of every change, and of how things stand, before anybody acts on it."""
        async with self._adopting:
            self._admit = admit
            await self._tell(self._plans, self._banned)

    async def banned(self, peer: PeerId) -> HetnodeError:
        """Return, once `peer` is banned, the error with which a link to it ends."""
        async with self._changed:
            await self._changed.wait_for(lambda: peer in self._banned)
        return HetnodeError(
            ErrorCode.NEIGHBOUR_LOST,
            f"The operator has banned the neighbour {peer} from the run; its link is closed.",
            "The run goes on without its replica; start this node again for the next one.",
        )

    async def _watch(self) -> None:
        while True:
            try:
                async for news in self._coordinator.watch():
                    await self._take(news)
                    if news.finished:
                        return
                    if news.plan is None and news.waiting:
                        log.info("%s", news.waiting)
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                log.warning("%s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _take(self, news: PlanNews) -> None:
        """Adopt a plan and the bans; the averagers first, as others may act on them before this node."""
        async with self._adopting:
            plans = dict(self._plans)
            if news.plan is not None:
                plans[news.plan.epoch] = news.plan
            if plans == self._plans and news.banned == self._banned:
                return
            for peer in news.banned - self._banned:
                log.warning("peer %s is banned from the run", peer)
            await self._tell(plans, news.banned)
            async with self._changed:
                self._plans, self._banned = plans, news.banned
                self._changed.notify_all()

    async def _tell(self, plans: Mapping[int, Plan], banned: Set[PeerId]) -> None:
        if self._admit is None:
            return
        # Two plans, because not all peers go over to the next one at the same moment.
        newest = [plans[epoch] for epoch in sorted(plans)[-2:]]
        placed = {member.peer for plan in newest for replica in plan.replicas for member in replica.members}
        try:
            await self._admit(placed, banned)
        except HetnodeError as error:
            if error.code is not ErrorCode.DHT_UNREACHABLE:
                raise
            log.warning("%s", error)

    async def _beat(self) -> None:
        while True:
            try:
                await self._coordinator.heartbeat(*self.progress)
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                log.warning("%s", error)
            await asyncio.sleep(self._heartbeat)
