"""The queries of a run's history, for faces. coordinator.storage answers them from SQLite."""

from __future__ import annotations

from typing import Protocol

from coordinator.history.peer_records import CreditOrder, Credits, PeerDetail, PeerPage
from coordinator.history.records import (
    LossPoint,
    MemberFigures,
    Page,
    PlanDetail,
    PlanSummary,
    ReplicaSummary,
    RoundDetail,
    RoundSummary,
    SpeedPoint,
    Summary,
    TrafficPoint,
)
from protocol.types import PeerId

MOST_ROWS = 1000
"""Most rows or points that one query returns; a greater `most` or `Page.most` counts as this."""
FIRST_PAGE = Page()


class History(Protocol):
    """Answers from the history of one run, as far as it is written: some events may be on their way.

    A query may be called from any thread, and may wait for a disk: never call it on an event loop. Lists are
    bounded by :data:`MOST_ROWS`, those of one round by the members of its plan. Every query raises
    HetnodeError NO_HISTORY where the history cannot be read.
    """

    @property
    def problem(self) -> str:
        """A sentence: why the history is not complete or cannot be read; "" if all is well."""

    def summary(self) -> Summary: ...

    def replicas(self, page: Page = FIRST_PAGE) -> tuple[ReplicaSummary, ...]:
        """The replicas that have measured a round, by index."""

    def losses(self, replica: int | None = None, most: int = 500) -> tuple[LossPoint, ...]:
        """By round, thinned to at most `most` points. `replica` None: the mean over all replicas."""

    def speed(self, most: int = 500) -> tuple[SpeedPoint, ...]:
        """Committed tokens per second by round, thinned to at most `most` points."""

    def traffic(
        self, replica: int | None = None, position: int | None = None, most: int = 500
    ) -> tuple[TrafficPoint, ...]:
        """By round, thinned to at most `most` points: of all members, of one replica, or of one position."""

    def members(self, round_number: int) -> tuple[MemberFigures, ...]:
        """What the members measured in a round: bytes of each link, seconds. By replica and position."""

    def rounds(self, before: int | None = None, most: int = 50) -> tuple[RoundSummary, ...]:
        """The newest rounds first, from the one below `before` on; None: from the newest."""

    def round(self, round_number: int) -> RoundDetail | None:
        """All about one round; None if it has not begun."""

    def peers(self, page: Page = FIRST_PAGE) -> PeerPage: ...

    def peer(self, peer: PeerId, most: int = 100) -> PeerDetail | None:
        """All about one peer, at most `most` rows of each list; None if it has never joined."""

    def credits(self, order: CreditOrder = CreditOrder.TOKENS, page: Page = FIRST_PAGE) -> Credits: ...

    def plans(self, before: int | None = None, most: int = 50) -> tuple[PlanSummary, ...]:
        """The newest plans first, from the epoch below `before` on; None: from the newest."""

    def plan(self, epoch: int) -> PlanDetail | None: ...
