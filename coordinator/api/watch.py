"""Updates for peers that watch the run: plans, followers, excluded peers, sources, pauses, its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from typing import Self

from coordinator.membership.sources import NOTHING, MemberSources, Position
from coordinator.run.state.state import State
from coordinator.status.messages import pause_message, peer_message, run_message
from protocol.pb import hetnode_pb2 as pb
from protocol.status import RunPhase
from protocol.trust.envelope import Signer
from protocol.types import Lifecycle, Pause, PeerId, Plan, RelayAddress, Rollback
from protocol.wire.convert.fields import MAX_BANNED, MAX_RELAYS
from protocol.wire.convert.plans import pause_to_pb, place_to_pb, relay_to_pb, rollback_to_pb, source_to_pb
from protocol.wire.plan_pieces import pieces_of
from protocol.wire.records import seal_plan

_FOLLOWING = (Lifecycle.SYNCING, Lifecycle.READY)
_KEPT_PLANS = 8
"""Plans whose bytes are kept; a watcher that is further behind is told by bytes that are made again."""


@dataclass(frozen=True)
class Announcement:
    """The part of an update that is the same for all watchers of `state`."""

    state: State
    stall: str
    waiting: str
    followers: tuple[pb.Place, ...]
    banned: tuple[PeerId, ...]
    relays: tuple[RelayAddress, ...]
    pause: Pause | None
    rollback: Rollback | None
    succession: pb.Succession


def _newest_rollback(state: State) -> Rollback | None:
    newest = max(state.restored, default=0)
    return Rollback(newest, state.restored[newest]) if newest else None


def _refused(state: State) -> tuple[PeerId, ...]:
    """The peers that nodes refuse: as many as nodes take, banned ones and then those that came last.

    The certificates of the others run out, and they get no new ones.
    """

    def rank(peer: PeerId) -> tuple[bool, float]:
        return peer in state.banned, state.peers[peer].joined_at if peer in state.peers else 0.0

    return tuple(sorted(nlargest(MAX_BANNED, state.excluded, rank)))


_ALONE = pb.Succession()


def alone(_: State) -> pb.Succession:
    """What a coordinator without a standby tells."""
    return _ALONE


def _lists(announcement: Announcement) -> tuple[object, ...]:
    return announcement.followers, announcement.banned, announcement.relays, announcement.succession


@dataclass(frozen=True)
class _Plans:
    """The epochs of the plan of an update, and of the plan that the watcher has; 0 for none."""

    newer: int = 0
    former: int = 0


class Announcements:
    """Builds each announcement and signs each plan once for all watchers.

    `own_relay` is the coordinator's, if it runs one. `stall` says why the run waits, as watchers are to be
    told, `succession` what they learn of this coordinator and its partner.

    Attributes:
        resting: the peers that wait for the end of the run alone, with the number of their calls.
    """

    def __init__(
        self,
        run: str,
        sign: Signer,
        sources: MemberSources,
        own_relay: RelayAddress | None = None,
        resting: Counter[PeerId] | None = None,
        stall: Callable[[], str] = str,
        succession: Callable[[State], pb.Succession] = alone,
    ) -> None:
        self._stall, self._succession = stall, succession
        self._run, self._sign, self.sources = run, sign, sources
        self._own_relays = () if own_relay is None else (own_relay,)
        self._sealed_plans: dict[int, tuple[bytes, bytes]] = {}
        self._newest: Announcement | None = None
        self._messages: dict[tuple[_Plans, bool, str, Position, Position], pb.PlanUpdate] = {}
        self.resting: Counter[PeerId] = Counter() if resting is None else resting

    def of(self, state: State) -> Announcement:
        stall, succession = self._stall(), self._succession(state)
        # Identity is enough: states are immutable, and a comparison would cost more than an announcement.
        former = self._newest
        is_same = former is not None and former.state is state and former.succession is succession
        if former is None or not is_same or former.stall != stall:
            finished = state.phase is RunPhase.FINISHED
            waiting = run_message(state) if finished else stall or pause_message(state)
            followers = [
                reservation
                for peer, reservation in sorted(state.reservations.items())
                if state.peers[peer].lifecycle in _FOLLOWING
            ]
            excluded = _refused(state)
            places = tuple(map(place_to_pb, followers))
            if self._newest is not None and places == self._newest.followers:
                places = (
                    self._newest.followers
                )  # each watcher compares them, which takes no time for one object
            self._newest = Announcement(
                *(state, stall, waiting, places, excluded, self.relays(state), state.pause),
                *(_newest_rollback(state), succession),
            )
            self._messages.clear()
        assert self._newest is not None
        return self._newest

    def message(
        self, announcement: Announcement, plans: _Plans, same_lists: bool, waiting: str, since: Position
    ) -> pb.PlanUpdate:
        """An update with the newest `announcement`, and with the sources that were noted after `since`.

        Most watchers have received the same so far, so they share one message: callers must not change it.

        Args:
            plans: the plan of the update, and the one that it may be told from.
            same_lists: the watcher has the lists, and takes changes.
        """
        key = (plans, same_lists, waiting, since, self.sources.position)
        if key not in self._messages:
            state = announcement.state
            update = pb.PlanUpdate(
                finished=plans.newer == 0 and state.phase is RunPhase.FINISHED,
                waiting=waiting,
                round=max(0, state.current_round),
                sources=map(source_to_pb, self.sources.since(since)),
                same_lists=same_lists,
                pause=pause_to_pb(announcement.pause) if announcement.pause else None,
                rollback=rollback_to_pb(announcement.rollback) if announcement.rollback else None,
            )
            if not same_lists:
                update.banned.extend(announcement.banned)
                update.followers.extend(announcement.followers)
                update.relays.extend(map(relay_to_pb, announcement.relays))
                update.succession.CopyFrom(announcement.succession)
            if plans.newer:
                self._add_plan(update, state, plans)
            self._messages[key] = update
        return self._messages[key]

    def _add_plan(self, update: pb.PlanUpdate, state: State, plans: _Plans) -> None:
        newer, former = state.plan_of(plans.newer), state.plan_of(plans.former)
        assert newer is not None, "an update is made from a plan of the same state"
        signed_plan, update.signature = self.sealed(newer)
        if former is not None:
            update.pieces.extend(pieces_of(self.sealed(former)[0], signed_plan))
        if not update.pieces:
            update.signed_plan = signed_plan

    def relays(self, state: State) -> tuple[RelayAddress, ...]:
        """The relays of the run, the coordinator's own first."""
        return (*self._own_relays, *state.relays)[:MAX_RELAYS]

    def sealed(self, plan: Plan) -> tuple[bytes, bytes]:
        """The bytes of `plan` and the coordinator's signature."""
        if plan.epoch not in self._sealed_plans:
            self._sealed_plans[plan.epoch] = seal_plan(plan, self._run, self._sign)
            if len(self._sealed_plans) > _KEPT_PLANS:
                del self._sealed_plans[min(self._sealed_plans)]
        return self._sealed_plans[plan.epoch]


class Watcher:
    """Knows what one peer has received so far, and builds its next update. Use as a context manager.

    Each call has a watcher of its own: a broken stream begins anew with all that the peer must know.

    Args:
        end_only: the peer rests, and is told the end of the run alone.
        changes: the peer takes what has changed since its last update.
    """

    def __init__(
        self, peer: PeerId, announcements: Announcements, end_only: bool = False, changes: bool = False
    ) -> None:
        self._peer, self._end_only, self._takes_changes = peer, end_only, changes
        self._announcements = announcements
        self._epoch = 0
        self._told: Announcement | None = None
        self._waiting = ""
        self._sources = NOTHING

    def __enter__(self) -> Self:
        self._announcements.resting += Counter([self._peer] * self._end_only)
        return self

    def __exit__(self, *_: object) -> None:
        self._announcements.resting -= Counter([self._peer] * self._end_only)

    def update(self, state: State) -> pb.PlanUpdate | None:
        """The next update for the peer; None while it has received everything.

        Each update has at most one plan; the first update has that of the open round.
        """
        if self._end_only and state.phase is not RunPhase.FINISHED:
            return None
        announcement, sources = self._announcements.of(state), self._announcements.sources
        if self._end_only:
            return pb.PlanUpdate(finished=True, waiting=announcement.waiting)
        newer = [plan for plan in state.plans if plan.epoch > self._epoch]
        plan = next(iter(newer), None)
        if plan is not None and not self._epoch:
            plan = state.plan_for(state.current_round)
        waiting = (
            ""
            if plan
            else announcement.waiting or peer_message(state, self._peer, self._announcements.resting)
        )
        told = self._told
        has_lists = told is not None and _lists(told) == _lists(announcement)
        is_new = (
            plan is not None
            or told is None
            or sources.told > self._sources
            or not has_lists
            or (told.pause, told.rollback) != (announcement.pause, announcement.rollback)
            or waiting not in ("", self._waiting)  # "" alone is no news: the next plan shows it
        )
        if not is_new and state.phase is not RunPhase.FINISHED:
            return None
        plans = _Plans(plan.epoch if plan else 0, self._epoch if plan and self._takes_changes else 0)
        same_lists = has_lists and self._takes_changes
        update = self._announcements.message(announcement, plans, same_lists, waiting, self._sources)
        self._epoch = plans.newer or self._epoch
        self._told, self._waiting, self._sources = announcement, waiting, sources.position
        return update
