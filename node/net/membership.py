"""A node's membership in its run: its heartbeats, and the plans, reservations and bans that it receives.

One file because the view has no other source than the tasks that keep it here.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NoReturn, TypeVar

from node.net.coordinator_client import CoordinatorClient
from node.net.live_estimates import LiveEstimates
from node.net.plan_updates import PlanUpdate
from node.security.channels import WrongClock
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import MemberSource
from protocol.spec.change import changed
from protocol.spec.run import RunSpec
from protocol.status import Wait
from protocol.types import (
    Capacity,
    Pause,
    PeerId,
    Plan,
    RelayAddress,
    Replica,
    ReservedAssignment,
    Rollback,
    StageRange,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

Admit = Callable[[Set[PeerId], "RunView"], Awaitable[None]]
"""Called with the peers that have an assignment or a reserved one, and with the view that says so."""

TEMPORARY = frozenset((ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.RATE_LIMITED))
"""Failures of a call that end by themselves."""
_RETRY_SECONDS, _POLL_SECONDS = 1.0, 0.2
_LONG_AWAY_SECONDS = 600.0
_RETURNS = "this node goes on by itself when it answers"
_IF_GONE = (
    f"{_RETURNS}, at this address or at one that other nodes know. Ask the operator whether the run goes on: "
    "if it has moved, 'hetnode leave' and 'hetnode join' with a new invite lead there"
)
_SOURCES_OF_PEER = 4  # as many as the coordinator remembers
_KEPT_ROUNDS = 32  # whose plans are kept: a run of months has thousands, which each change would visit


@dataclass(frozen=True)
class PeerAssignment:
    """A peer's position in a replica of a plan."""

    plan: Plan
    replica: Replica
    position: int

    def first_step(self, round_number: int) -> int:
        """The inner step (0-based) with which the replica begins in a round under this plan."""
        is_in_phase = round_number == self.plan.from_round and self.replica.resumed_in > self.plan.repairs
        return self.replica.resumes_at if is_in_phase else 0

    @property
    def is_first(self) -> bool:
        return self.position == 0

    @property
    def is_last(self) -> bool:
        return self.position == len(self.replica.members) - 1


@dataclass(frozen=True)
class RunView:
    """The run as the coordinator described it last.

    `session` counts how often this node has joined, `round_number` is the open round. `followers` have a
    reserved assignment and are not in the newest plan. `followed` gives for each peer the epoch of the newest
    plan in which it was a follower: its assignments in plans up to that one are not valid. `relays` are those
    of the run. `sources` are the newest ones of each peer that has called the coordinator, also of banned
    peers. `pause` is None while the run is not paused. `rollback` is the newest one,
    if there was any.
    """

    session: int = 1
    plans: Mapping[int, Plan] = field(default_factory=dict)
    followers: Mapping[PeerId, ReservedAssignment] = field(default_factory=dict)
    followed: Mapping[PeerId, int] = field(default_factory=dict)
    banned: frozenset[PeerId] = frozenset()
    sources: Mapping[PeerId, tuple[str, ...]] = field(default_factory=dict)
    round_number: int = 0
    finished: bool = False
    relays: tuple[RelayAddress, ...] = ()
    pause: Pause | None = None
    rollback: Rollback | None = None

    @property
    def epoch(self) -> int:
        """Of the newest plan; 0 before any."""
        return max(self.plans, default=0)

    @property
    def newest(self) -> Plan | None:
        return self.plans[max(self.plans)] if self.plans else None

    def spec_in(self, round_number: int, spec: RunSpec) -> RunSpec:
        """The specification of a round, as far as the newest known plan tells; the run began with `spec`.

        Its data are those of the open round, if that is a later one: no round before is trained any more, so
        this machine need not have the data of former rounds.

        Raises HetnodeError BAD_SPEC for changes that no run can have.
        """
        changes, newest = self.newest.changes if self.newest else (), max(round_number, self.round_number)
        then, now = (
            changed(spec, (each for each in changes if each.from_round <= number))
            for number in (round_number, newest)
        )
        if then.data == now.data:
            return then
        return then.model_copy(update={"data": now.data, "began_as": now.began_as})

    def plan_for(self, round_number: int) -> Plan | None:
        """The newest known plan that is valid in `round_number`."""
        valid = [epoch for epoch, plan in self.plans.items() if plan.from_round <= round_number]
        return self.plans[max(valid)] if valid else None

    def assignment_of(self, peer: PeerId, round_number: int) -> PeerAssignment | None:
        """The assignment with which `peer` trains in `round_number`; None if it only follows the rounds."""
        plan = self.plan_for(round_number)
        replica = plan.replica_of(peer) if plan else None
        if plan is None or replica is None or plan.epoch <= self.followed.get(peer, 0):
            return None
        return PeerAssignment(plan, replica, replica.position_of(peer))

    def is_held(self, round_number: int) -> bool:
        """Whether the run is paused and no inner phase of this round, which is not decided, may begin."""
        is_decided = self.round_number > round_number
        return self.pause is not None and self.pause.holds(round_number) and not is_decided

    def trains(self, peer: PeerId) -> bool:
        """Whether `peer` has an assignment in the open round."""
        return self.assignment_of(peer, self.round_number) is not None

    def reservation_of(self, peer: PeerId) -> ReservedAssignment | None:
        """The stages that `peer` hosts in the newest plan, or will host in a later plan."""
        if peer in self.followers:
            return self.followers[peer]
        replica = self.newest.replica_of(peer) if self.newest else None
        if replica is None:
            return None
        position = replica.position_of(peer)
        return ReservedAssignment(peer, replica.index, position, replica.members[position].stages)

    def has_given_up(self, peer: PeerId) -> bool:
        """Whether `peer` has retreated from its assignment in the newest plan."""
        newest = self.newest
        return newest is not None and newest.replica_of(peer) is not None and peer in self.followers

    def hosts(self) -> dict[PeerId, StageRange]:
        """For each peer the stages that it hosts or whose rounds it follows."""
        replicas = self.newest.replicas if self.newest else ()
        assigned = {member.peer: member.stages for replica in replicas for member in replica.members}
        return assigned | {each.peer: each.stages for each in self.followers.values()}

    def hosts_of(self, stage: int) -> list[PeerId]:
        """The peers that host `stage` now, or follow its rounds."""
        return sorted(peer for peer, stages in self.hosts().items() if stage in stages)


class Membership:
    """Keeps this node a member of the run while :meth:`keep` runs; other tasks read its view of the run.

    A coordinator that is away for some time is normal; it is only logged. If the coordinator has removed this
    node as lost, the node joins again. Any other refusal ends `keep`.

    Args:
        join: joins the run again.
        heartbeat: seconds between two heartbeats, or more if the coordinator says so: in a large swarm. They
            report `estimates` that have changed.

    Attributes:
        progress, waits, kept: (round number, inner step), what this node waits for, and the rounds whose
            anchors are on its disk; heartbeats report them.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        join: Callable[[], Awaitable[object]],
        heartbeat: float,
        estimates: LiveEstimates | None = None,
    ) -> None:
        self._coordinator, self._join = coordinator, join
        self._heartbeat = self._least_heartbeat = heartbeat
        self._admit: Admit | None = None
        self._adopting = asyncio.Lock()  # one new view at a time, because `admit` is awaited in between
        self._joining = asyncio.Lock()  # several tasks may notice a lost session; one of them joins again
        self._changed = asyncio.Condition()
        self._stream: asyncio.Task[None] | None = None
        self._is_away, self._next_report = False, 0.0
        self._answered = self._now()
        self._closing: tuple[int, float] | None = None
        self._moves = 0
        self.run_view = RunView()
        self.estimates = estimates or LiveEstimates(Capacity("", 0, 0))
        self.progress = (0, 0)
        self.waits: Callable[[], tuple[Wait, ...]] = tuple
        self.kept: tuple[int, ...] = ()

    @property
    def run(self) -> str:
        return self._coordinator.credentials.run

    @property
    def away(self) -> float:
        """Seconds since the last answer of the coordinator, less two heartbeats; at least 0."""
        return max(0.0, self._now() - self._answered - 2 * self._heartbeat)

    async def until_away(self) -> None:
        """Wait until the coordinator does not answer: its connection has failed, or heartbeats are missed."""
        while not (self._is_away or self.away):  # noqa: ASYNC110  time alone may end this
            await asyncio.sleep(_POLL_SECONDS)

    def closes_in(self, round_number: int) -> float | None:
        """Seconds until `round_number` closes for new offers; None if unknown, negative if it has closed."""
        if self.run_view.round_number > round_number:
            return -1.0
        if self._closing is None or self._closing[0] != round_number:
            return None
        return self._closing[1] - self._now()

    async def keep(self) -> NoReturn:
        """Run until cancelled. Raises HetnodeError if the coordinator refuses this node."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_watching())
            group.create_task(self._send_heartbeats())
        raise AssertionError("membership tasks never end by themselves")

    async def until(self, ready: Callable[[RunView], T | None]) -> T:
        """Wait until `ready` returns a value for the newest view; return that value."""
        async with self._changed:
            while (value := ready(self.run_view)) is None:
                await self._changed.wait()
            return value

    async def joined_after(self, session: int) -> None:
        """Wait until this node has joined again after `session`."""
        await self.until(lambda run_view: True if run_view.session > session else None)

    async def rejoin(self, session: int) -> None:
        """Join again after `session` has ended, once for all tasks that have noticed the end.

        Raises HetnodeError if the coordinator refuses this node.
        """
        async with self._joining:
            if self.run_view.session > session:
                return
            log.warning("the coordinator has removed this node as lost: joining again")
            await until_answered(self._join, _RETRY_SECONDS)
            self.estimates.joined()
            self._answered = self._now()
            # The known plans belong to the former session; a new stream sends all again.
            async with self._adopting:
                now = self.run_view
                await self._replace_view(RunView(session + 1, banned=now.banned, sources=now.sources))
                if self._stream is not None:
                    self._stream.cancel()

    async def attach(self, admit: Admit) -> None:
        """Call `admit` now and after every change, before other tasks see the change."""
        async with self._adopting:
            self._admit = admit
            await self._update_allow_list(self.run_view)

    async def note_move(self) -> None:
        """This machine has lost the address from which its links were opened, or at which they arrived."""
        self._moves += 1
        await self._replace_view(self.run_view)

    async def link_over(self, neighbour: PeerId) -> HetnodeError:
        """Wait until an open link to `neighbour` is of no use any more; return the error with which it ends.

        Connections do not show it: their other end may be silent for long before they fail.
        """
        moves, sources = self._moves, self.run_view.sources.get(neighbour, ())

        def why(run_view: RunView) -> str | None:
            if neighbour in run_view.banned:
                return f"The operator has banned the neighbour {neighbour} from the run"
            if run_view.has_given_up(neighbour):
                return f"The neighbour {neighbour} has given up its assignment"
            if has_moved(sources, run_view.sources.get(neighbour, ())):
                return f"The neighbour {neighbour} has another address"
            return "This machine has another address" if self._moves > moves else None

        return HetnodeError(
            ErrorCode.NEIGHBOUR_LOST,
            f"{await self.until(why)}; the link is closed.",
            "No action is needed: this node follows the run until a plan assigns it again.",
        )

    async def _keep_watching(self) -> None:
        while not self.run_view.finished:
            session = self.run_view.session
            self._stream = asyncio.create_task(self._follow_updates(), name="watch")
            try:
                await asyncio.wait({self._stream})
            finally:
                self._stream.cancel()
            if not self._stream.cancelled():  # `rejoin` cancels it
                await self._handle(self._stream.exception(), session)
            await asyncio.sleep(jittered(_RETRY_SECONDS))

    async def _follow_updates(self) -> None:
        is_first = True
        async for update in self._coordinator.watch():
            if is_first and update.plan is not None:
                # A coordinator of an older copy makes plans that the newest copy does not know.
                newest, view = update.plan.epoch, self.run_view
                plans = {epoch: plan for epoch, plan in view.plans.items() if epoch <= newest}
                followed = {peer: epoch for peer, epoch in view.followed.items() if epoch <= newest}
                self.run_view = replace(view, plans=plans, followed=followed)
            is_first = False
            await self._adopt(update)
            if update.plan is None and update.waiting and not update.finished:
                log.info("%s", update.waiting)

    async def _handle(self, error: BaseException | None, session: int) -> None:
        """Join again if the coordinator has removed this node; continue if it is away; otherwise raise."""
        if error is None:
            return
        if not isinstance(error, HetnodeError):
            raise error
        if error.code is ErrorCode.UNKNOWN_PEER:
            await self.rejoin(session)
        elif error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
            raise error
        elif not self._is_away or self.away >= self._next_report:
            self._next_report = 2 * self.away if self._is_away else _LONG_AWAY_SECONDS
            since = f", {self.away / 60:.0f} min so far" * self._is_away
            action = _IF_GONE if self._is_away else _RETURNS
            self._is_away = True
            told = error.remedy if isinstance(error, WrongClock) else action
            log.warning("waiting for the coordinator%s; %s: %s", since, told, error.cause)

    async def _adopt(self, update: PlanUpdate) -> None:
        """Make `update` the newest view. The allow list comes first: other peers may act before this node."""
        async with self._adopting:
            now = self.run_view
            plans = now.plans if update.plan is None else {**now.plans, update.plan.epoch: update.plan}
            plans = _kept(plans, max(now.round_number, update.round_number) - _KEPT_ROUNDS)
            followers = {each.peer: each for each in update.followers}
            followed = {peer: epoch for peer, epoch in now.followed.items() if epoch >= min(plans, default=0)}
            then = replace(
                now,
                plans=plans,
                followers=followers,
                followed={**followed, **dict.fromkeys(followers, max(plans, default=0))},
                banned=update.banned,
                sources=_with_new(now.sources, update.sources),
                round_number=max(now.round_number, update.round_number),
                finished=now.finished or update.finished,
                relays=update.relays,
                pause=update.pause,
                rollback=update.rollback or now.rollback,
            )
            if now.pause is not None and then.pause is None and not then.finished:
                log.info("the run is no longer paused")
            for peer in then.banned - now.banned:
                log.warning("peer %s is banned from the run", peer)
            if _admission_of(then) != _admission_of(now):
                await self._update_allow_list(then)
            # A heartbeat may have told of a later round meanwhile.
            newest = max(then.round_number, self.run_view.round_number)
            await self._replace_view(replace(then, round_number=newest))

    async def _replace_view(self, run_view: RunView) -> None:
        async with self._changed:
            self.run_view = run_view
            self._changed.notify_all()

    async def _update_allow_list(self, run_view: RunView) -> None:
        if self._admit is None:
            return
        # The peers of the last two plans, because peers change to the next plan at different times.
        newest = [run_view.plans[epoch] for epoch in sorted(run_view.plans)[-2:]]
        placed = {member.peer for plan in newest for replica in plan.replicas for member in replica.members}
        try:
            await self._admit(placed | run_view.followers.keys(), run_view)
        except HetnodeError as error:
            if error.code is not ErrorCode.DHT_UNREACHABLE:
                raise
            log.warning("%s", error)

    async def _send_heartbeats(self) -> None:
        while True:
            async with self._joining:
                pass  # a heartbeat after a join whose answer was lost would make the next join one of another
            session = self.run_view.session
            try:
                changed = self.estimates.due(self._now())
                reply = await self._coordinator.heartbeat(*self.progress, changed, self.waits(), self.kept)
                self._answered = self._now()
                self._heartbeat = max(self._least_heartbeat, reply.interval)
                if changed is not None:
                    self.estimates.reported(changed, self._answered)
                if self._is_away:
                    self._is_away = False
                    log.info("the coordinator is back")
                if reply.closes_seconds is not None:
                    self._closing = (reply.round_number, self._answered + reply.closes_seconds)
                if reply.round_number > self.run_view.round_number:
                    await self._replace_view(replace(self.run_view, round_number=reply.round_number))
            except HetnodeError as error:
                await self._handle(error, session)
            slept = self._now()
            await asyncio.sleep(jittered(self._heartbeat))
            if self._now() - slept > 3 * self._heartbeat:
                self._answered = self._now()  # this process was suspended; the coordinator was not away

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _admission_of(run_view: RunView) -> tuple[object, ...]:
    """What decides which peers and which sources are admitted."""
    return run_view.plans, run_view.followers, run_view.banned, run_view.sources


def _kept(plans: Mapping[int, Plan], oldest: int) -> Mapping[int, Plan]:
    """Those of `plans` under which a round from `oldest` on runs."""
    following = dict(pairwise(sorted(plans)))
    ended = {one for one, other in following.items() if plans[other].from_round <= oldest}
    return {epoch: plan for epoch, plan in plans.items() if epoch not in ended}


def _with_new(
    known: Mapping[PeerId, tuple[str, ...]], new: Sequence[MemberSource]
) -> Mapping[PeerId, tuple[str, ...]]:
    """`known` with the new sources; of each peer the newest stay.

    Sources are only added: a coordinator that has started again does not know all of them yet.
    """
    sources = dict(known)
    for each in new:
        others = [source for source in sources.get(each.peer, ()) if source != each.source]
        sources[each.peer] = (*others, each.source)[-_SOURCES_OF_PEER:]
    return sources


def has_moved(before: Collection[str], now: Collection[str]) -> bool:
    """Whether calls that came from the sources `before` come from another one `now`.

    The first source of IPv4 or IPv6 is no news: a machine may use both.
    """
    versions = {":" in source for source in before}
    return any((":" in source) in versions for source in now if source not in before)


def jittered(seconds: float) -> float:
    """`seconds` times a random factor, so that peers that fail together do not retry together."""
    return seconds * random.uniform(0.75, 1.25)


async def until_answered(
    call: Callable[[], Awaitable[T]],
    pause: float,
    on_failure: Callable[[HetnodeError], None] = lambda error: None,
    temporary: Collection[ErrorCode] = (ErrorCode.COORDINATOR_UNREACHABLE,),
) -> T:
    """The result of `call`, repeated after about `pause` seconds while it fails with a `temporary` error.

    Calls `on_failure`, which may raise, after each attempt. Raises every other error of `call`.
    """
    while True:
        try:
            return await call()
        except HetnodeError as error:
            if error.code not in temporary:
                raise
            on_failure(error)
        await asyncio.sleep(jittered(pause))
