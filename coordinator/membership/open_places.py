"""Places of peers without an invite, in a run that its operator has opened to everyone.

Such a peer gets a place under its identity, the last one in the order of arrival. It may join when there is
room, and waits for its turn until then. It keeps its place across restarts of both sides, and loses that
after PLACE_SECONDS without a sign of life. Room is kept for an admitted peer for SEAT_SECONDS after it left.

There is room for as many as the run can score: members with weight measure them
(coordinator.membership.scores), each with its own neighbours in the circle. A source is an IPv4 address or an
IPv6 /64. The places that it gets in an hour are bounded, and so are those that it has, however many
identities it uses. A place does not end when its peer leaves, so leaving makes no room for another identity.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from statistics import fmean

from coordinator.base.phrases import counted
from coordinator.membership.validation import check_not_excluded, check_not_finished, check_peer_id
from coordinator.run.state.commands import AskPlace
from coordinator.run.state.events import PlaceAsked
from coordinator.run.state.records import OpenPlace
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Waiting
from protocol.trust.invite import OPEN_INVITE
from protocol.types import PeerId

PLACE_SECONDS = 24 * 3600.0
"""A computer that is off at night keeps its place."""
SEAT_SECONDS = 1800.0
"""A machine restarts, with its updates, in less. Until then the room of a peer that has left stays free."""
REFRESH_SECONDS = 600.0
"""A peer that waits asks far more often than that; the event log needs to know it only so often."""
MOST_WAITING = 1000
SCORED_BY_EACH = 4
"""Unproven peers for each replica with weight. Each member measures 16 payloads of a round, so that three
replicas with weight and twelve without are all measured by three."""
HOURS_HELD = 4
"""A source has at most as many places as it could get in this number of hours."""
_HOUR = 3600.0


@dataclass(frozen=True)
class OpenTerms:
    """How many peers an open run takes without an invite: at once, and from one source in an hour."""

    members: int
    joins: int

    def concern(self, state: State, peer: PeerId) -> bool:
        """Whether `peer`, which has a certificate, came without an invite, as far as is known.

        An older copy of the log does not know all. In a run that is open, who is not known is a stranger.
        """
        return state.enrolled.get(peer, OPEN_INVITE if self.members else "") == OPEN_INVITE

    def ask(self, peer: PeerId, source: str) -> AskPlace:
        return AskPlace(peer, source, self.members, self.joins)


CLOSED = OpenTerms(0, 0)
"""The terms of a run that needs an invite."""
_KEPT = "No action is needed: this node keeps its place, also across restarts, and asks again by itself."
_ASKS = "No action is needed: this node asks again by itself."


def ask_place(transaction: Transaction, command: AskPlace) -> None:
    """Give the peer a place, or keep it, and let the peer in if it is its turn. No effect on invited peers.

    Raises:
        HetnodeError: BANNED, QUARANTINED; RUN_STARTED after the end; INVITE_REVOKED if the run is not open;
            WAITING_LIST while there is no room, with the place of the peer or why it gets none yet.
    """
    state, peer, now = transaction.state, command.peer, transaction.now
    check_peer_id(peer)
    check_not_excluded(state, peer)
    check_not_finished(state)
    if state.enrolled.get(peer, OPEN_INVITE) != OPEN_INVITE:
        return
    if not command.members:
        raise HetnodeError(
            ErrorCode.INVITE_REVOKED,
            "This run is not open: its operator lets in peers with an invite alone.",
            "Ask the operator of the run for an invite.",
        )
    ended = tuple(each for each in state.open_places if each != peer and _has_ended(state, each, now))
    known = state.open_places.get(peer)
    if known is None:
        _check_source([each for name, each in state.open_places.items() if name not in ended], command, now)
    is_admitted = _is_its_turn(state, command, set(ended), now)
    is_news = known is None or known.admitted is not is_admitted or now - known.asked >= REFRESH_SECONDS
    if is_news or ended:
        source = known.source if known else command.source  # else a second address would free the first
        transaction.add(PlaceAsked(now, peer, source, is_admitted, ended))
    if not is_admitted:
        everyone = waiting(transaction.state, now)
        own = next(each for each in everyone if each.peer == peer)
        first = "" if _most_unproven(state) else "; members with an invite have to train first"
        raise _not_yet(place_text(own, len(everyone)) + first, _KEPT)


def keep_place(transaction: Transaction, peer: PeerId) -> None:
    """A peer without an invite has gone: its place is kept from now on."""
    if (place := transaction.state.open_places.get(peer)) is not None:
        transaction.add(PlaceAsked(transaction.now, peer, place.source, place.admitted))


def waiting(state: State, now: float) -> tuple[Waiting, ...]:
    """The peers that wait for their turn, in order; others that keep a place are not there at present.

    The time is estimated from those that are in: each of them stays about as long again as until now, and
    then finds its room for SEAT_SECONDS.
    """
    joined = [state.peers[each].joined_at for each in state.open_places if _is_live(state, each)]
    pace = fmean(now - at for at in joined) / len(joined) if joined else None
    found = [
        peer
        for peer in state.open_places
        if peer not in state.excluded and _is_near(state, peer, now) and not _has_seat(state, peer, now)
    ]
    return tuple(
        Waiting(peer, place, None if pace is None else SEAT_SECONDS + place * pace)
        for place, peer in enumerate(found, 1)
    )


def place_text(waiting: Waiting, count: int) -> str:
    """Such as "place 3 of 12 in the waiting list, about 2.0 h at the present pace"."""
    if waiting.seconds is None:
        pace = "no estimate yet"
    else:
        minutes = max(1.0, waiting.seconds / 60)
        pace = f"about {minutes:.0f} min" if minutes < 90 else f"about {minutes / 60:.1f} h"
        pace += " at the present pace"
    return f"place {waiting.place} of {count} in the waiting list, {pace}"


def _check_source(places: Sequence[OpenPlace], command: AskPlace, now: float) -> None:
    """Raise WAITING_LIST if there is no place for a new peer from this source."""
    own = [place for place in places if place.source == command.source]
    recent, most = sum(now - place.since < _HOUR for place in own), command.joins
    if recent >= most:
        came = counted(recent, "peer")
        raise _not_yet(f"no place yet: {came} came from {command.source} within an hour, at most {most} may")
    if len(own) >= HOURS_HELD * most:
        raise _not_yet(f"no place yet: {counted(len(own), 'peer')} from {command.source} have one")
    if len(places) >= command.members + MOST_WAITING:
        raise _not_yet(f"no place yet: the waiting list is full, with {counted(len(places), 'peer')}")


def _is_its_turn(state: State, command: AskPlace, ended: Set[PeerId], now: float) -> bool:
    """Whether the run has room for the peer, and for those before it that are still there."""
    peer = command.peer
    if _is_live(state, peer):
        return True  # whatever the operator allows by now
    others = [each for each in state.open_places if each not in state.excluded | ended and each != peer]
    seats = [each for each in others if _has_seat(state, each, now)]
    if peer in state.open_places and _has_seat(state, peer, now):
        return len(seats) < command.members
    order = list(state.open_places)
    earlier = order[: order.index(peer)] if peer in order else order
    ahead = {each for each in others if each in earlier and _is_near(state, each, now)}.difference(seats)
    is_proven = peer in state.open_places and peer not in state.discounted
    unproven = sum(map(state.is_unproven, seats)) + len(ahead)
    can_be_scored = is_proven or unproven < _most_unproven(state)
    return can_be_scored and len(seats) + len(ahead) < command.members


def _most_unproven(state: State) -> int:
    """How many peers the run can score at a time; none before it trains."""
    replicas = state.plan_for(state.current_round).replicas if state.plans else ()
    return SCORED_BY_EACH * sum(map(state.has_weight, replicas))


def _has_seat(state: State, peer: PeerId, now: float) -> bool:
    return _is_live(state, peer) or (state.open_places[peer].admitted and _is_near(state, peer, now))


def _is_live(state: State, peer: PeerId) -> bool:
    known = state.peers.get(peer)
    return known is not None and known.is_live


def _is_near(state: State, peer: PeerId, now: float) -> bool:
    return _away(state, peer, now) < SEAT_SECONDS


def _has_ended(state: State, peer: PeerId, now: float) -> bool:
    return not _is_live(state, peer) and _away(state, peer, now) >= PLACE_SECONDS


def _away(state: State, peer: PeerId, now: float) -> float:
    """Seconds without a sign of life; while the coordinator does not run, they do not count."""
    return now - max(state.open_places[peer].asked, state.started_at)


def _not_yet(what: str, remedy: str = _ASKS) -> HetnodeError:
    return HetnodeError(ErrorCode.WAITING_LIST, f"{what}.", remedy)
