"""Records that :class:`coordinator.store.history.SqliteHistory` answers with, about the past of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coordinator.store.history_tables import (
    Contribution,
    EstimatePoint,
    JournalLine,
    MemberFigures,
    PeerTotals,
    StageRow,
)
from protocol.types import PeerId


class CreditOrder(StrEnum):
    """By what :meth:`SqliteHistory.credits` sorts, the greatest first; NAME sorts by peer id."""

    TOKENS = "tokens"
    ROUNDS = "rounds"
    PAYLOAD = "payload"
    LINK = "link"
    NAME = "peer"


@dataclass(frozen=True)
class Page:
    """Which part of a list is wanted: `most` rows after the first `skip`."""

    skip: int = 0
    most: int = 100


FIRST_PAGE = Page()


@dataclass(frozen=True)
class LossPoint:
    """The losses of one replica, or the means over all replicas, at a round.

    A thinned list has one point for several rounds: the newest of them. `least` and `greatest` are the
    validation losses of all these rounds and, where no replica was named, of all replicas. They show a spike
    that thinning leaves out. None: not finite or not measured.
    """

    round_number: int
    at: float
    validation_loss: float | None
    train_loss: float | None
    least: float | None
    greatest: float | None


@dataclass(frozen=True)
class SpeedPoint:
    """Committed tokens per second at stage 0; a thinned list has the mean of several rounds.

    `seconds` is from the begin of the first of these rounds to the decisions of the last, whose number is
    `round_number`; `rounds` is how many they are.
    """

    round_number: int
    rounds: int
    at: float
    tokens: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class TrafficPoint:
    """The bytes of all members in one round, and what dense float32 would have taken.

    A thinned list has the mean of `rounds` rounds, of which `round_number` is the last.
    """

    round_number: int
    rounds: int
    link_bytes: int
    link_bytes_dense: int
    payload_bytes: int
    payload_bytes_dense: int


@dataclass(frozen=True)
class PhaseSeconds:
    """The seconds of one (stage, round) by what it waited for; None while that phase is not over.

    Attributes:
        inner: from the begin of the round to the first offer.
        offer: from there until the group was closed.
        group: from there to the last report of a member.
        decision: from there to the decision; contested payloads are fetched in this time.
    """

    inner: float | None
    offer: float | None
    group: float | None
    decision: float | None


@dataclass(frozen=True)
class StageRound:
    """All about one (stage, round). `contributions` are sorted by replica, then by peer."""

    summary: StageRow
    phases: PhaseSeconds
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class RoundSummary:
    """One round in a list of rounds.

    Attributes:
        epoch: of its plan.
        began_at, began_sequence: when the round before it was decided at every stage, or its plan adopted.
        first_began_at, first_sequence: the same of its first begin.
        restarts: how often it began anew with another plan; what was offered before does not count.
        seconds: from `began_at` to its last decision; None while a stage is open.
        tokens: committed at stage 0.
        validation_loss: mean over its replicas.
        stages: in order; a stage without an event yet is not there.
    """

    round_number: int
    epoch: int
    began_at: float
    began_sequence: int
    first_began_at: float
    first_sequence: int
    restarts: int
    seconds: float | None
    tokens: int
    validation_loss: float | None
    stages: tuple[StageRow, ...]


@dataclass(frozen=True)
class RoundDetail:
    """All about one round. `members`: their measurements, by replica and position."""

    summary: RoundSummary
    stages: tuple[StageRound, ...]
    members: tuple[MemberFigures, ...]


@dataclass(frozen=True)
class Credit:
    """What a peer, or an owner by all peers, has done: exact, from the event log, but for `link_bytes`.

    Attributes:
        stage_tokens: each token of a committed payload counts once for each stage at which it was committed.
        stage_rounds: the (stage, round)s in whose manifest a payload of the peer is.
        payload_bytes: of these payloads.
        link_bytes: sent to its neighbours, by its own count, which is not checked.
        first_round, last_round: that counted; 0 without any.
        sequence: of the last event that changed its credit.
        name: its public name, or "".
        owner: the id of whose the peer is, or "".
        nodes: the peers that are summed up; `peer` and `name` are those of the one with the most tokens.
    """

    peer: PeerId
    stage_tokens: int
    stage_rounds: int
    payload_bytes: int
    link_bytes: int
    first_round: int
    last_round: int
    sequence: int
    name: str = ""
    owner: str = ""
    nodes: int = 1


@dataclass(frozen=True)
class Credits:
    """A page of credits, one for each owner and for each peer without one, and the sums over all peers.

    `owners` counts both kinds. `sequence`: of the newest event that they contain.
    """

    run: str
    sequence: int
    peers: int
    stages: int
    tokens: int
    stage_tokens: int
    stage_rounds: int
    payload_bytes: int
    link_bytes: int
    credits: tuple[Credit, ...]
    owners: int = 0


@dataclass(frozen=True)
class PeerDetail:
    """All about one peer. Lists are bounded by the query, the newest first; estimates are in order."""

    summary: PeerTotals
    credit: Credit
    changes: tuple[JournalLine, ...]
    contributions: tuple[Contribution, ...]
    figures: tuple[MemberFigures, ...]
    estimates: tuple[EstimatePoint, ...]
