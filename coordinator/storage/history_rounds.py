"""Queries of the history about rounds, and what became of the payloads in them."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from coordinator.history.records import (
    Contribution,
    Outcome,
    PhaseSeconds,
    RoundDetail,
    RoundSummary,
    StageRound,
    StageSummary,
    Standing,
)
from coordinator.storage.history_reading import Row, optional_seconds, seconds, within
from coordinator.storage.history_runs import members
from protocol.types import PeerId

_OUTCOMES, _STANDINGS = tuple(Outcome), tuple(Standing)
_ROUND = (
    "SELECT r.round, r.epoch, r.began_at, r.began_sequence, r.restarts, r.decided_at, r.tokens,"
    " f.validation_sum / f.losses FROM rounds AS r LEFT JOIN round_figures AS f ON f.round = r.round"
)
# An open stage has a row since its first offer: how many there are now, its contributions tell.
_STAGE = (
    "SELECT round, stage, outcome, decided_sequence, decided_at, iif(outcome, offered, (SELECT count(*)"
    " FROM contributions AS c WHERE c.round = s.round AND c.stage = s.stage AND c.standing = 0)),"
    " counted, payload_bytes, tokens, coalesce(reason, ''), first_offer_at, closed_at, closed_sequence,"
    " gather, last_report_at, contested FROM stage_rounds AS s"
)
# A reason of NULL is that of the decision.
_CONTRIBUTION = (
    "SELECT c.round, c.stage, p.peer, c.replica, c.standing, c.offered_at, c.offered_sequence,"
    " c.reported_at, c.reported_sequence, c.held, c.weight, c.nbytes, c.tokens,"
    " coalesce(c.reason, s.reason, ''), c.reason_sequence, c.cosine, c.norm"
    " FROM contributions AS c JOIN peers AS p ON p.number = c.peer"
    " LEFT JOIN stage_rounds AS s ON s.round = c.round AND s.stage = c.stage"
)


def rounds(db: sqlite3.Connection, before: int | None, most: int) -> tuple[RoundSummary, ...]:
    found = db.execute(
        f"{_ROUND} WHERE ?1 IS NULL OR r.round < ?1 ORDER BY r.round DESC LIMIT ?2", (before, within(most))
    ).fetchall()
    if not found:
        return ()
    stages = defaultdict(list)
    for row in db.execute(
        f"{_STAGE} WHERE round BETWEEN ? AND ? ORDER BY round, stage", (found[-1][0], found[0][0])
    ):
        stages[row[0]].append(_stage(row))
    return tuple(_round(row, stages[row[0]]) for row in found)


def round_detail(db: sqlite3.Connection, round_number: int) -> RoundDetail | None:
    row = db.execute(f"{_ROUND} WHERE r.round = ?", (round_number,)).fetchone()
    if row is None:
        return None
    found = db.execute(f"{_STAGE} WHERE round = ? ORDER BY stage", (round_number,)).fetchall()
    parts = defaultdict(list)
    for each in contributions(db, "c.round = ? ORDER BY c.stage, c.replica, p.peer", round_number):
        parts[each.stage].append(each)
    began_at = row[2]
    stages = tuple(
        StageRound(
            summary=_stage(stage),
            closed_at=optional_seconds(stage[11]),
            closed_sequence=stage[12],
            gather_seconds=seconds(stage[13]),
            contested=stage[15],
            phases=_phases(began_at, stage[10], stage[11], stage[14], stage[4]),
            contributions=tuple(parts[stage[1]]),
        )
        for stage in found
    )
    figures = members(db, "m.round = ? ORDER BY m.replica, m.position, m.at", round_number)
    return RoundDetail(_round(row, [stage.summary for stage in stages]), stages, figures)


def contributions(db: sqlite3.Connection, where: str, *values: int) -> Iterable[Contribution]:
    """`where`: a clause of our own, with its order."""
    for row in db.execute(f"{_CONTRIBUTION} WHERE {where}", values):
        yield Contribution(
            round_number=row[0],
            stage=row[1],
            peer=PeerId(row[2]),
            replica=row[3],
            standing=_STANDINGS[row[4]],
            offered_at=optional_seconds(row[5]),
            offered_sequence=row[6],
            reported_at=optional_seconds(row[7]),
            reported_sequence=row[8],
            held=row[9],
            weight=row[10],
            nbytes=row[11],
            tokens=row[12],
            reason=row[13],
            reason_sequence=row[14],
            cosine=row[15],
            norm=row[16],
        )


def _round(row: Row, stages: Iterable[StageSummary]) -> RoundSummary:
    round_number, epoch, began_at, began_sequence, restarts, decided_at, tokens, loss = row
    time = None if decided_at is None else seconds(decided_at - began_at)
    begin = seconds(began_at), began_sequence, restarts
    return RoundSummary(round_number, epoch, *begin, time, tokens, loss, tuple(stages))


def _stage(row: Row) -> StageSummary:
    return StageSummary(
        stage=row[1],
        outcome=_OUTCOMES[row[2]],
        decided_sequence=row[3],
        decided_at=optional_seconds(row[4]),
        offered=row[5],
        counted=row[6],
        payload_bytes=row[7],
        tokens=row[8],
        reason=row[9],
    )


def _phases(
    began: int, offered: int | None, closed: int | None, reported: int | None, decided: int | None
) -> PhaseSeconds:
    """Each phase from the end of the one before it. A phase without an end of its own took no time."""
    if offered is None and decided is not None:
        # No payload came: the round waited for offers until its decision.
        return PhaseSeconds(None, seconds(decided - began), None, None)
    ends = [began, offered, closed, reported if decided is not None else None, decided]
    if decided is not None and closed is not None and reported is None:
        ends[3] = closed  # nobody reported: the decision waited for all of this time
    return PhaseSeconds(
        *(
            None if start is None or end is None else max(0.0, seconds(end - start))
            for start, end in pairwise(ends)
        )
    )
