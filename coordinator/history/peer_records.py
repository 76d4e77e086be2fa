"""What the history of a run answers about peers: sessions, changes, measurements, and credit.

Units and terms as in :mod:`coordinator.history.records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coordinator.history.records import Contribution, MemberFigures
from protocol.types import PeerId, Reachability, Role


class CreditOrder(StrEnum):
    """By what :meth:`History.credits` sorts, the greatest first; NAME sorts by peer id."""

    TOKENS = "tokens"
    ROUNDS = "rounds"
    PAYLOAD = "payload"
    LINK = "link"
    NAME = "peer"


@dataclass(frozen=True)
class Credit:
    """What one peer has done for the run: exact, from the event log.

    Attributes:
        stage_tokens: each token of a committed payload counts once for each stage at which it was committed.
        stage_rounds: the (stage, round)s in whose manifest a payload of the peer is.
        payload_bytes: of these payloads.
        link_bytes: that it has sent to its neighbours, as it measured itself. Nobody checks this figure.
        first_round, last_round: that counted; 0 without any.
        sequence: of the last event that changed its credit.
    """

    peer: PeerId
    stage_tokens: int
    stage_rounds: int
    payload_bytes: int
    link_bytes: int
    first_round: int
    last_round: int
    sequence: int


@dataclass(frozen=True)
class Credits:
    """A page of credits, and the sums over all peers. `sequence`: of the newest event that they contain."""

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


@dataclass(frozen=True)
class PeerSummary:
    """One peer in a list of peers.

    Attributes:
        number: of the peer in this history: peers are numbered from 1 in the order of their first event.
        sessions: how often it has joined.
        is_here: it has joined and not left, nor was it lost.
        last_at, last_sequence: of the newest change of the peer; measurements and payloads are none.
        last_change: what that was, such as "joined", "left", "lost", "strike".
        strikes, failures: that were ever given; failures are losses, retreats and divergences.
    """

    number: int
    peer: PeerId
    role: Role
    is_here: bool
    sessions: int
    first_at: float
    last_at: float
    last_change: str
    last_sequence: int
    strikes: int
    failures: int
    credit: Credit


@dataclass(frozen=True)
class PeerPage:
    """A page of peers, in the order of their first events, and how many there are in all."""

    total: int
    peers: tuple[PeerSummary, ...]


@dataclass(frozen=True)
class Session:
    """The time from one join of a peer to its end. `left_at` None: it goes on.

    `end` says how it ended: "left", "lost", "banned", "quarantined" or "joined again"; "" while it goes on.
    `reason` is a sentence, which the peer may have written.
    """

    joined_at: float
    joined_sequence: int
    role: Role
    device: str
    reachability: Reachability | None
    left_at: float | None
    left_sequence: int
    end: str
    reason: str


@dataclass(frozen=True)
class PeerChange:
    """One event about a peer. `kind` is a short word such as "joined"; `text` a sentence for people."""

    sequence: int
    at: float
    round_number: int
    kind: str
    text: str


@dataclass(frozen=True)
class EstimatePoint:
    """What a peer had measured of itself at one time; 0 means not measured. As protocol.types.Estimates."""

    sequence: int
    at: float
    flops: float
    uplink: float
    downlink: float
    round_trip: float
    microbatch_seconds: float


@dataclass(frozen=True)
class PeerDetail:
    """All about one peer. Lists are bounded by the query, the newest first; estimates are in order."""

    summary: PeerSummary
    sessions: tuple[Session, ...]
    changes: tuple[PeerChange, ...]
    contributions: tuple[Contribution, ...]
    figures: tuple[MemberFigures, ...]
    estimates: tuple[EstimatePoint, ...]
