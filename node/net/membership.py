"""A node's standing in the swarm: heartbeats, the plans and bans pushed to it, and its record in the DHT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from node.net.coordinator_client import CoordinatorClient, PlanNews
from node.net.hive.client import Hivemind
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import RunSpec
from protocol.types import PeerId, PeerRecord, Plan, StageRange

log = logging.getLogger(__name__)

_RECORD_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class Membership:
    """Keeps this node a member of the run while :meth:`keep` runs; other tasks ask it for plans.

    Losing the coordinator or the DHT for a while is normal and only logged; being refused ends `keep`.
    """

    def __init__(
        self, spec: RunSpec, coordinator: CoordinatorClient, hivemind: Hivemind, record: PeerRecord
    ) -> None:
        self._spec, self._coordinator, self._hivemind = spec, coordinator, hivemind
        self._record = record
        self._plans: dict[int, Plan] = {}
        self._banned: frozenset[PeerId] = frozenset()
        self._changed = asyncio.Condition()
        self.progress = (0, 0)
        """(round, inner step) that heartbeats report."""

    async def keep(self) -> NoReturn:
        """Run until cancelled. Raises HetnodeError when the coordinator no longer knows this node."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._beat())
            group.create_task(self._publish())
        raise AssertionError("membership tasks never end by themselves")

    async def plan(self, epoch: int | None = None) -> Plan:
        """The plan of `epoch` (None: the newest one), as soon as it is known."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._plans if epoch is None else epoch in self._plans)
            return self._plans[max(self._plans) if epoch is None else epoch]

    async def banned(self, peer: PeerId) -> HetnodeError:
        """Return, once `peer` is banned, the error with which a link to it ends."""
        async with self._changed:
            await self._changed.wait_for(lambda: peer in self._banned)
        return HetnodeError(
            ErrorCode.NEIGHBOUR_LOST,
            f"The operator has banned the neighbour {peer} from the run; its link is closed.",
            "The run goes on without its replica; start this node again for the next one.",
        )

    async def take_stages(self, stages: StageRange) -> None:
        """Publish which stages this node now hosts."""
        self._record = replace(self._record, stages=stages)
        await self._publish_once()

    async def published_endpoints(self) -> Mapping[str, str]:
        """host:port by peer id, as peers say in the DHT; empty where the DHT cannot be asked."""
        try:
            records = await self._hivemind.lookup()
        except HetnodeError as error:
            log.warning("no records from the DHT, using the plan's endpoints: %s", error)
            return {}
        return {peer: record.endpoint for peer, record in records.items() if record.endpoint}

    async def _watch(self) -> None:
        while True:
            try:
                async for news in self._coordinator.watch():
                    await self._take(news)
                    if news.plan is None and news.waiting:
                        log.info("%s", news.waiting)
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                log.warning("%s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _take(self, news: PlanNews) -> None:
        """Adopt a plan and the bans; the averagers first, as others may act on them before this node."""
        plans = dict(self._plans)
        if news.plan is not None:
            plans[news.plan.epoch] = news.plan
        if plans == self._plans and news.banned == self._banned:
            return
        for peer in news.banned - self._banned:
            log.warning("peer %s is banned from the run", peer)
        # Two plans, because not all peers go over to the next one at the same moment.
        newest = [plans[epoch] for epoch in sorted(plans)[-2:]]
        placed = {member.peer for plan in newest for replica in plan.replicas for member in replica.members}
        try:
            await self._hivemind.admit(placed, news.banned)
        except HetnodeError as error:
            if error.code is not ErrorCode.DHT_UNREACHABLE:
                raise
            log.warning("%s", error)
        async with self._changed:
            self._plans, self._banned = plans, news.banned
            self._changed.notify_all()

    async def _beat(self) -> None:
        while True:
            try:
                await self._coordinator.heartbeat(*self.progress)
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    raise
                log.warning("%s", error)
            await asyncio.sleep(self._spec.timing.heartbeat)

    async def _publish(self) -> None:
        while True:
            await self._publish_once()
            await asyncio.sleep(_RECORD_SECONDS / 3)

    async def _publish_once(self) -> None:
        try:
            await self._hivemind.publish(self._record, _RECORD_SECONDS)
        except HetnodeError as error:
            if error.code is not ErrorCode.DHT_UNREACHABLE:
                raise
            log.warning("%s", error)
