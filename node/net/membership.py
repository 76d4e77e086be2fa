"""A node's standing with the coordinator: heartbeats, and the plans, places and bans pushed to it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

from node.net.coordinator_client import CoordinatorClient, PlanUpdate
from node.net.live_estimates import LiveEstimates
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Capacity, PeerId, Plan, Replica, ReservedAssignment, StageRange

log = logging.getLogger(__name__)
T = TypeVar("T")

Admit = Callable[[Set[PeerId], Set[PeerId]], Awaitable[None]]
"""Told who has a place in the run and who is banned."""

_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Assignment:
    """Where a plan puts this node."""

    plan: Plan
    replica: Replica
    position: int

    @property
    def is_first(self) -> bool:
        return self.position == 0

    @property
    def is_last(self) -> bool:
        return self.position == len(self.replica.members) - 1


@dataclass(frozen=True)
class RunView:
    """What the coordinator has said last.

    `session` counts how often this node has joined; `round` is the one that is open. `followed` is the epoch
    of the newest plan in which each peer had no part: its seats in plans up to that one do not count.
    """

    session: int = 1
    plans: Mapping[int, Plan] = field(default_factory=dict)
    followers: Mapping[PeerId, ReservedAssignment] = field(default_factory=dict)
    followed: Mapping[PeerId, int] = field(default_factory=dict)
    banned: frozenset[PeerId] = frozenset()
    round_number: int = 0
    finished: bool = False

    @property
    def newest(self) -> Plan | None:
        return self.plans[max(self.plans)] if self.plans else None

    def plan_for(self, round_number: int) -> Plan | None:
        """The plan in force in `round_`, as far as plans are known."""
        return next(
            (p for _, p in sorted(self.plans.items(), reverse=True) if p.from_round <= round_number), None
        )

    def assignment_of(self, peer: PeerId, round_number: int) -> Assignment | None:
        """Where `peer` trains in `round_`; None while it follows."""
        plan = self.plan_for(round_number)
        replica = plan.replica_of(peer) if plan else None
        if plan is None or replica is None or plan.epoch <= self.followed.get(peer, 0):
            return None
        return Assignment(plan, replica, replica.position_of(peer))

    def trains(self, peer: PeerId) -> bool:
        """Whether `peer` has a seat in the open round."""
        return self.assignment_of(peer, self.round_number) is not None

    def place_of(self, peer: PeerId) -> ReservedAssignment | None:
        """The place that `peer` has in the newest plan, or is to have in a later one."""
        if peer in self.followers:
            return self.followers[peer]
        replica = self.newest.replica_of(peer) if self.newest else None
        if replica is None:
            return None
        position = replica.position_of(peer)
        return ReservedAssignment(peer, replica.index, position, replica.members[position].stages)

    def hosts(self) -> dict[PeerId, StageRange]:
        """The stages of all peers that host any now, or follow their rounds."""
        replicas = self.newest.replicas if self.newest else ()
        seated = {member.peer: member.stages for replica in replicas for member in replica.members}
        return seated | {place.peer: place.stages for place in self.followers.values()}

    def hosts_of(self, stage: int) -> list[PeerId]:
        """The peers that host `stage` now, or follow its rounds."""
        return sorted(peer for peer, stages in self.hosts().items() if stage in stages)


class Membership:
    """Keeps this node a member of the run while :meth:`keep` runs; other tasks ask it for plans.

    Losing the coordinator for a while is normal and only logged. A coordinator that took this node for lost
    is joined again; being refused otherwise ends `keep`.

    Args:
        join: joins the run again.
        heartbeat: seconds between two heartbeats.
        estimates: told to the coordinator with heartbeats, as they change.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        join: Callable[[], Awaitable[object]],
        heartbeat: float,
        estimates: LiveEstimates | None = None,
    ) -> None:
        self._coordinator, self._join, self._heartbeat = coordinator, join, heartbeat
        self._admit: Admit | None = None
        self._adopting = asyncio.Lock()
        self._joining = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._stream: asyncio.Task[None] | None = None
        self._is_missed = False
        self._answered = self._now()
        self._closes: tuple[int, float] | None = None
        self.run_view = RunView()
        self.estimates = estimates or LiveEstimates(Capacity("", 0, 0))
        self.progress = (0, 0)
        """(round, inner step) that heartbeats report."""

    @property
    def away(self) -> float:
        """Seconds for which the coordinator has not answered, beyond the usual."""
        return max(0.0, self._now() - self._answered - 2 * self._heartbeat)

    def closes_in(self, round_number: int) -> float | None:
        """Seconds until offers for `round_` close, as far as that is known; below 0 where they have."""
        if self.run_view.round_number > round_number:
            return -1.0
        if self._closes is None or self._closes[0] != round_number:
            return None
        return self._closes[1] - self._now()

    async def keep(self) -> NoReturn:
        """Run until cancelled. Raises HetnodeError when the coordinator will not have this node."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._beat())
        raise AssertionError("membership tasks never end by themselves")

    async def until(self, ready: Callable[[RunView], T | None]) -> T:
        """What `ready` makes of the standing, as soon as that is not None."""
        async with self._changed:
            while (value := ready(self.run_view)) is None:
                await self._changed.wait()
            return value

    async def joined_after(self, session: int) -> None:
        """Return once this node has joined again since `session`."""
        await self.until(lambda run_view: True if run_view.session > session else None)

    async def rejoin(self, session: int) -> None:
        """Join again, once for all who found out that `session` is over; return when that is done.

        Raises HetnodeError when the coordinator will not have this node.
        """
        async with self._joining:
            if self.run_view.session > session:
                return
            log.warning("the coordinator has taken this node for lost: joining again")
            while True:
                try:
                    await self._join()
                    self.estimates.joined()
                    break
                except HetnodeError as error:
                    if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                        raise
                await asyncio.sleep(jittered(_RETRY_SECONDS))
            self._answered = self._now()
            # What was known of plans is of the former session; a new stream tells everything again.
            async with self._adopting:
                await self._set(RunView(session + 1, banned=self.run_view.banned))
                if self._stream is not None:
                    self._stream.cancel()

    async def attach(self, admit: Admit) -> None:
        """From now on `admit` hears of every change, and of how things stand, before anybody acts on it."""
        async with self._adopting:
            self._admit = admit
            await self._tell(self.run_view)

    async def banned(self, peer: PeerId) -> HetnodeError:
        """Return, once `peer` is banned, the error with which a link to it ends."""
        await self.until(lambda run_view: True if peer in run_view.banned else None)
        return HetnodeError(
            ErrorCode.NEIGHBOUR_LOST,
            f"The operator has banned the neighbour {peer} from the run; its link is closed.",
            "This node follows the run until another peer takes that place.",
        )

    async def _watch(self) -> None:
        while not self.run_view.finished:
            session = self.run_view.session
            self._stream = asyncio.create_task(self._take_all(), name="watch")
            try:
                await asyncio.wait({self._stream})
            finally:
                self._stream.cancel()
            if not self._stream.cancelled():
                await self._bear(self._stream.exception(), session)
            await asyncio.sleep(jittered(_RETRY_SECONDS))

    async def _take_all(self) -> None:
        async for news in self._coordinator.watch():
            await self._take(news)
            if news.plan is None and news.waiting and not news.finished:
                log.info("%s", news.waiting)

    async def _bear(self, error: BaseException | None, session: int) -> None:
        """Join again where the coordinator no longer knows this node, go on where it is away; else raise."""
        if error is None:
            return
        if not isinstance(error, HetnodeError):
            raise error
        if error.code is ErrorCode.UNKNOWN_PEER:
            await self.rejoin(session)
        elif error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
            raise error
        elif not self._is_missed:
            self._is_missed = True
            log.warning("waiting for the coordinator, there is nothing to do here: %s", error.cause)

    async def _take(self, news: PlanUpdate) -> None:
        """Adopt what is new; the averagers first, as others may act on it before this node."""
        async with self._adopting:
            now = self.run_view
            plans = now.plans if news.plan is None else {**now.plans, news.plan.epoch: news.plan}
            followers = {place.peer: place for place in news.followers}
            then = replace(
                now,
                plans=plans,
                followers=followers,
                followed={**now.followed, **dict.fromkeys(followers, max(plans, default=0))},
                banned=news.banned,
                round_number=max(now.round_number, news.round_number),
                finished=now.finished or news.finished,
            )
            for peer in then.banned - now.banned:
                log.warning("peer %s is banned from the run", peer)
            if (then.plans, then.followers, then.banned) != (now.plans, now.followers, now.banned):
                await self._tell(then)
            await self._set(then)

    async def _set(self, run_view: RunView) -> None:
        async with self._changed:
            self.run_view = run_view
            self._changed.notify_all()

    async def _tell(self, run_view: RunView) -> None:
        if self._admit is None:
            return
        # Two plans, because not all peers go over to the next one at the same moment.
        newest = [run_view.plans[epoch] for epoch in sorted(run_view.plans)[-2:]]
        placed = {member.peer for plan in newest for replica in plan.replicas for member in replica.members}
        try:
            await self._admit(placed | run_view.followers.keys(), run_view.banned)
        except HetnodeError as error:
            if error.code is not ErrorCode.DHT_UNREACHABLE:
                raise
            log.warning("%s", error)

    async def _beat(self) -> None:
        while True:
            session = self.run_view.session
            try:
                news = self.estimates.news(self._now())
                pulse = await self._coordinator.heartbeat(*self.progress, news)
                self._answered = self._now()
                if news is not None:
                    self.estimates.told(news, self._answered)
                if self._is_missed:
                    self._is_missed = False
                    log.info("the coordinator is back")
                if pulse.closes_seconds is not None:
                    self._closes = (pulse.round_number, self._answered + pulse.closes_seconds)
                if pulse.round_number > self.run_view.round_number:
                    await self._set(replace(self.run_view, round_number=pulse.round_number))
            except HetnodeError as error:
                await self._bear(error, session)
            slept = self._now()
            await asyncio.sleep(jittered(self._heartbeat))
            if self._now() - slept > 3 * self._heartbeat:
                self._answered = self._now()  # it was this process that was away

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def jittered(seconds: float) -> float:
    """So that those who lost the coordinator at the same moment do not all come back at the same moment."""
    return seconds * random.uniform(0.75, 1.25)
