"""Answers queries from ``history.sqlite``, while the coordinator writes it or when no coordinator runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coordinator.history.peer_records import CreditOrder, Credits, PeerDetail, PeerPage
from coordinator.history.queries import FIRST_PAGE
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
from coordinator.storage import history_peers, history_rounds, history_runs
from coordinator.storage.history_reading import reading
from protocol.errors import HetnodeError
from protocol.types import PeerId


class SqliteHistory:
    """:class:`coordinator.history.queries.History` of the file at `path`, which need not be there yet.

    Args:
        writer_problem: of the writer, in the process of the coordinator.
    """

    def __init__(self, path: Path, writer_problem: Callable[[], str] = lambda: "") -> None:
        self.path = path
        self._writer_problem = writer_problem

    @property
    def problem(self) -> str:
        if problem := self._writer_problem():
            return problem
        try:
            with reading(self.path):
                return ""
        except HetnodeError as error:
            return error.cause

    def summary(self) -> Summary:
        with reading(self.path) as db:
            return history_runs.summary(db)

    def replicas(self, page: Page = FIRST_PAGE) -> tuple[ReplicaSummary, ...]:
        with reading(self.path) as db:
            return history_runs.replicas(db, page)

    def losses(self, replica: int | None = None, most: int = 500) -> tuple[LossPoint, ...]:
        with reading(self.path) as db:
            return history_runs.losses(db, replica, most)

    def speed(self, most: int = 500) -> tuple[SpeedPoint, ...]:
        with reading(self.path) as db:
            return history_runs.speed(db, most)

    def traffic(
        self, replica: int | None = None, position: int | None = None, most: int = 500
    ) -> tuple[TrafficPoint, ...]:
        with reading(self.path) as db:
            return history_runs.traffic_points(db, replica, position, most)

    def members(self, round_number: int) -> tuple[MemberFigures, ...]:
        with reading(self.path) as db:
            return history_runs.members(db, "m.round = ? ORDER BY m.replica, m.position, m.at", round_number)

    def rounds(self, before: int | None = None, most: int = 50) -> tuple[RoundSummary, ...]:
        with reading(self.path) as db:
            return history_rounds.rounds(db, before, most)

    def round(self, round_number: int) -> RoundDetail | None:
        with reading(self.path) as db:
            return history_rounds.round_detail(db, round_number)

    def peers(self, page: Page = FIRST_PAGE) -> PeerPage:
        with reading(self.path) as db:
            return history_peers.peers(db, page)

    def peer(self, peer: PeerId, most: int = 100) -> PeerDetail | None:
        with reading(self.path) as db:
            return history_peers.peer_detail(db, peer, most)

    def credits(self, order: CreditOrder = CreditOrder.TOKENS, page: Page = FIRST_PAGE) -> Credits:
        with reading(self.path) as db:
            return history_peers.credits(db, order, page)

    def plans(self, before: int | None = None, most: int = 50) -> tuple[PlanSummary, ...]:
        with reading(self.path) as db:
            return history_runs.plans(db, before, most)

    def plan(self, epoch: int) -> PlanDetail | None:
        with reading(self.path) as db:
            return history_runs.plan(db, epoch)
