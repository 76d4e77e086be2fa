"""Updates of a run that the coordinator streams to a node that watches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocol.errors import faulty_peer
from protocol.group.peers import MemberSource
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.term import ALONE, Succession
from protocol.types import Pause, PeerId, Plan, RelayAddress, ReservedAssignment, Rollback
from protocol.wire.convert.fields import banned_from_pb
from protocol.wire.convert.plans import (
    pause_from_pb,
    places_from_pb,
    relays_from_pb,
    rollback_from_pb,
    sources_from_pb,
    succession_from_pb,
)
from protocol.wire.plan_pieces import plan_from_pieces
from protocol.wire.records import open_plan

_Lists: TypeAlias = tuple[
    frozenset[PeerId], tuple[ReservedAssignment, ...], tuple[RelayAddress, ...], Succession
]


@dataclass(frozen=True)
class PlanUpdate:
    """One message of the Watch stream: a plan, or a sentence that says what the run waits for.

    `banned` are all banned peers, `followers` the reserved assignments of peers that are in no plan yet,
    `relays` all relays of the run, `sources` those of members that no former message of this stream had.
    `pause` is None while the run is not paused.
    """

    plan: Plan | None
    waiting: str
    finished: bool
    banned: frozenset[PeerId]
    followers: tuple[ReservedAssignment, ...] = ()
    round_number: int = 0
    relays: tuple[RelayAddress, ...] = ()
    sources: tuple[MemberSource, ...] = ()
    pause: Pause | None = None
    rollback: Rollback | None = None
    succession: Succession = ALONE


class PlanUpdates:
    """Opens the updates of one stream in their order: each may tell changes since the one before.

    Args:
        coordinator: the peer id whose key must have signed each plan of `run`.
    """

    def __init__(self, run: str, coordinator: str) -> None:
        self._run, self._coordinator = run, coordinator
        self._plan = b""
        self._lists: _Lists | None = None

    def opened(self, update: pb.PlanUpdate) -> PlanUpdate:
        """The update as a whole.

        Raises HetnodeError: WRONG_AUTHORITY if the plan is not signed with the coordinator's key; BAD_REQUEST
        for other faults. Then the stream is of no more use, and a new one tells everything again.
        """
        plan = None
        if update.signed_plan or update.pieces:
            self._plan = update.signed_plan or plan_from_pieces(self._plan, update.pieces)
            plan = open_plan(self._plan, update.signature, self._run, self._coordinator)
        if not update.same_lists:
            followers, relays = places_from_pb(update.followers), relays_from_pb(update.relays)
            succession = succession_from_pb(update.succession)
            self._lists = banned_from_pb(update.banned), followers, relays, succession
        if self._lists is None:
            raise faulty_peer("The coordinator tells changes of lists that it has not told.")
        banned, followers, relays, succession = self._lists
        return PlanUpdate(
            plan,
            update.waiting,
            update.finished,
            banned,
            followers,
            update.round,
            relays,
            sources_from_pb(update.sources),
            pause_from_pb(update.pause) if update.HasField("pause") else None,
            rollback_from_pb(update.rollback) if update.HasField("rollback") else None,
            succession,
        )
