"""The calls of people and their tools to a coordinator, and what it answers.

They travel as :mod:`protocol.wire.typed_calls`, over one method of gRPC: the service Operator. No node needs
them to take part in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.status import Explanation, ModelSample
from protocol.trust.owner_binding import OwnerBinding
from protocol.types import Lifecycle, Pause, PeerId, Role, RunChange
from protocol.wire.typed_calls import Request

MOST_BYTES = 1 << 16
"""Of a request. The refused ones are not parsed."""


@dataclass(frozen=True)
class IssuedInvite:
    """The secret string that a new peer needs, and its public id."""

    invite: str
    id: str


@dataclass(frozen=True)
class InviteStatus:
    """An invite, and the peers that have used it. `role` None admits any."""

    id: str
    uses: int
    peers: tuple[PeerId, ...]
    expires_in_seconds: float
    role: Role | None
    revoked: bool

    @property
    def lets_in(self) -> bool:
        """Whether a new peer may come with it."""
        return not self.revoked and self.expires_in_seconds > 0 and len(self.peers) < self.uses


@dataclass(frozen=True)
class EnrolledPeer:
    """A peer that was let in, has joined, or is banned.

    Attributes:
        invite: the id of the invite that admitted it, or "".
        lifecycle, role: None if it never joined.
        reason: of the ban.
        name: public, or "".
        rests: its process is here, and waits until its owner lets it take part again.
    """

    peer: PeerId
    invite: str
    lifecycle: Lifecycle | None
    role: Role | None
    banned: bool
    reason: str
    quarantined: bool
    name: str
    rests: bool


@dataclass(frozen=True)
class PauseAnswer:
    """The pause of the run, and whether it is new. `round_number` ends in spite of it; 0 if none is open."""

    changed: bool
    pause: Pause | None
    round_number: int


@dataclass(frozen=True)
class RestorableRound:
    """A former round, and the tokens committed in later ones.

    `problem` is a sentence that says why the run cannot go back to it now, or "".
    """

    round_number: int
    problem: str
    tokens: int


@dataclass(frozen=True)
class RollbackChoices:
    """The rounds to go back to, the newest first, and the open round."""

    rounds: tuple[RestorableRound, ...]
    round_number: int


@dataclass(frozen=True)
class Rank:
    """A place by stage tokens, 1 being the most, among the owners, and peers without one, that have any."""

    place: int
    peers: int


# With the operator's certificate


@dataclass(frozen=True)
class IssueInvite(Request[IssuedInvite]):
    """`role` None admits any role."""

    uses: int
    valid_seconds: float
    role: Role | None = None


@dataclass(frozen=True)
class ListInvites(Request[tuple[InviteStatus, ...]]):
    pass


@dataclass(frozen=True)
class WithdrawInvite(Request[None]):
    id: str


@dataclass(frozen=True)
class ListPeers(Request[tuple[EnrolledPeer, ...]]):
    pass


@dataclass(frozen=True)
class BanPeer(Request[tuple[InviteStatus, ...]]):
    """End the peer's calls and streams, and refuse the peer until UnbanPeer.

    Answers the invites of the peer that let others in until now. `revoke_invites` withdraws them.
    """

    peer: str
    reason: str = ""
    revoke_invites: bool = False


@dataclass(frozen=True)
class UnbanPeer(Request[None]):
    peer: str


@dataclass(frozen=True)
class HoldRun(Request[PauseAnswer]):
    """No round begins from the next one on, until GoOn. Both calls may be repeated."""

    reason: str = ""


@dataclass(frozen=True)
class GoOn(Request[bool]):
    """Answers whether the run was paused."""


@dataclass(frozen=True)
class ChangeSettings(Request[RunChange]):
    """Let settings (protocol.spec.change) have other values from a round on; 0: from the first that can.

    Answers the change as it is recorded.
    """

    settings: tuple[str, ...]
    from_round: int = 0
    reason: str = ""


@dataclass(frozen=True)
class TakeName(Request[str]):
    """Take the public name of a peer, and refuse it any; or `allow` it one at its next join.

    Answers the name that the peer had, or "".
    """

    peer: str
    allow: bool = False


@dataclass(frozen=True)
class RestoreRound(Request[int]):
    """Answers the round whose decision restores the anchors after `restore_round`. The run is paused then."""

    restore_round: int
    reason: str = ""


@dataclass(frozen=True)
class ListRollbacks(Request[RollbackChoices]):
    pass


@dataclass(frozen=True)
class FollowLog(Request[tuple[tuple[str, bytes], ...]]):
    """A standby has the first `rows` rows of the event log; `row_hash` is that of the last one, in hex.

    Answers the next ones, kind and body, as soon as there are any; none after some seconds. `address` is
    where the standby will be reached if it takes the run over.
    """

    rows: int
    row_hash: str
    address: str


@dataclass(frozen=True)
class FollowMetrics(Request[bytes]):
    """Answers whole lines of ``metrics.jsonl`` from byte `begin` on; none where there are no more by now."""

    begin: int


# With any certificate of the run


@dataclass(frozen=True)
class AskWhy(Request[Explanation]):
    """`question`: "now", the number of a round, the end of a peer id, or "event N ..."."""

    question: str


@dataclass(frozen=True)
class NameOwner(Request[None]):
    """The caller is bound to an owner from now on, which gets its credit. May be repeated."""

    binding: OwnerBinding


@dataclass(frozen=True)
class AskReceipt(Request[str]):
    """Answers a signed statement of the caller's credit so far, the JSON of protocol.trust.receipt.

    The caller need not be live.
    """


@dataclass(frozen=True)
class AskRank(Request[Rank]):
    """Answers the place of the caller's owner, or its own without one. The caller need not be live."""


@dataclass(frozen=True)
class TellEvaluation(Request[None]):
    """What the model could do after `round_number` (protocol.status.ModelEvaluation). It may be repeated.

    The caller is a peer that has joined, or the operator. The coordinator bounds all of it
    (coordinator.membership.evaluations).
    """

    round_number: int
    name: str
    figures: Mapping[str, float]
    samples: tuple[ModelSample, ...] = ()
