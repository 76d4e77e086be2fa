"""Queries of the history about the run as a whole, its replicas and plans, over all rounds."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from coordinator.history import plan_body
from coordinator.history.records import (
    LossPoint,
    MemberFigures,
    Page,
    PlanDetail,
    PlanSummary,
    ReplicaSummary,
    SpeedPoint,
    Summary,
    TrafficPoint,
)
from coordinator.storage.history_reading import (
    TRAFFIC,
    Row,
    optional_seconds,
    part,
    seconds,
    stride,
    traffic,
    within,
)
from protocol.types import PeerId, Plan

SPEED_ROUNDS = 10
"""Newest decided rounds from which the speed of the run is known."""
_TRAFFIC = ", ".join(TRAFFIC)
_TRAFFIC_SUMS = ", ".join(f"sum({name})" for name in TRAFFIC)


def summary(db: sqlite3.Connection) -> Summary:
    run = db.execute(
        "SELECT run, sequence, at, stages, rounds, committed, aborted, tokens, stage_tokens, finished_at,"
        f" {_TRAFFIC} FROM run"
    ).fetchone()
    newest = db.execute(
        "SELECT round, began_at, decided_at, tokens FROM rounds ORDER BY round DESC LIMIT ?",
        (SPEED_ROUNDS + 1,),
    ).fetchall()
    decided = [row for row in newest if row[2] is not None][:SPEED_ROUNDS]
    time = seconds(decided[0][2] - decided[-1][1]) if decided else 0.0
    (began_at,) = db.execute("SELECT min(at) FROM plans").fetchone()
    return Summary(
        run=run[0],
        sequence=run[1],
        at=seconds(run[2]),
        stages=run[3],
        rounds=run[4],
        rounds_begun=newest[0][0] if newest else 0,
        rounds_decided=decided[0][0] if decided else 0,
        stage_rounds_committed=run[5],
        stage_rounds_aborted=run[6],
        tokens=run[7],
        stage_tokens=run[8],
        tokens_per_second=sum(row[3] for row in decided) / time if time > 0 else 0.0,
        began_at=optional_seconds(began_at),
        finished_at=optional_seconds(run[9]),
        peers=db.execute("SELECT count(*) FROM peers").fetchone()[0],
        plans=db.execute("SELECT count(*) FROM plans").fetchone()[0],
        traffic=traffic(run[10:]),
    )


def replicas(db: sqlite3.Connection, page: Page) -> tuple[ReplicaSummary, ...]:
    found = db.execute(
        "SELECT replica, first_round, last_round, members, epoch = (SELECT max(epoch) FROM plans),"
        f" validation_loss, train_loss, tokens, newest_tokens, newest_time, {_TRAFFIC} FROM replicas"
        " WHERE first_round IS NOT NULL ORDER BY replica LIMIT ? OFFSET ?",
        part(page),
    ).fetchall()
    names = names_of(db) if found else {}
    return tuple(
        ReplicaSummary(
            replica=row[0],
            first_round=row[1],
            last_round=row[2],
            members=tuple(names[int(number)] for number in row[3].split(",") if number),
            is_planned=bool(row[4]),
            validation_loss=row[5],
            train_loss=row[6],
            tokens=int(row[7]),
            tokens_per_second=row[8] / seconds(row[9]) if row[9] else 0.0,
            traffic=traffic(row[10:]),
        )
        for row in found
    )


def losses(db: sqlite3.Connection, replica: int | None, most: int) -> tuple[LossPoint, ...]:
    if replica is None:
        span = db.execute("SELECT min(round), max(round) FROM round_figures").fetchone()
        first, every = stride(span, most)
        # Division by zero gives NULL.
        found = db.execute(
            "SELECT f.round, f.at, f.validation_sum / f.losses, f.train_sum / f.train_losses,"
            " thin.least, thin.greatest FROM"
            " (SELECT max(round) AS last, min(least) AS least, max(greatest) AS greatest FROM round_figures"
            " GROUP BY (round - ?) / ?) AS thin JOIN round_figures AS f ON f.round = thin.last"
            " ORDER BY f.round",
            (first, every),
        )
    else:
        span = db.execute(
            "SELECT min(round), max(round) FROM replica_rounds WHERE replica = ?", (replica,)
        ).fetchone()
        first, every = stride(span, most)
        found = db.execute(
            "SELECT r.round, r.at, r.validation_loss, r.train_loss, thin.least, thin.greatest FROM"
            " (SELECT max(round) AS last, min(validation_loss) AS least, max(validation_loss) AS greatest"
            " FROM replica_rounds WHERE replica = ?1 GROUP BY (round - ?2) / ?3) AS thin"
            " JOIN replica_rounds AS r ON r.replica = ?1 AND r.round = thin.last ORDER BY r.round",
            (replica, first, every),
        )
    return tuple(LossPoint(row[0], seconds(row[1]), *row[2:]) for row in found)


def speed(db: sqlite3.Connection, most: int) -> tuple[SpeedPoint, ...]:
    span = db.execute("SELECT min(round), max(round) FROM rounds").fetchone()
    found = db.execute(
        "SELECT max(round), count(*), min(began_at), max(decided_at), sum(tokens) FROM rounds"
        " WHERE decided_at IS NOT NULL GROUP BY (round - ?) / ? ORDER BY round",
        stride(span, most),
    )
    return tuple(_speed_point(*row) for row in found)


def _speed_point(round_number: int, rounds: int, began: int, decided: int, tokens: int) -> SpeedPoint:
    time = max(0.0, seconds(decided - began))
    rate = tokens / time if time else 0.0
    return SpeedPoint(round_number, rounds, seconds(decided), tokens, time, rate)


def traffic_points(
    db: sqlite3.Connection, replica: int | None, position: int | None, most: int
) -> tuple[TrafficPoint, ...]:
    columns = f"max(round), count(*), max(at), sum(members), {_TRAFFIC_SUMS}"
    if replica is None:
        span = db.execute("SELECT min(round), max(round) FROM round_figures").fetchone()
        first, every = stride(span, most)
        found = db.execute(
            f"SELECT {columns} FROM round_figures GROUP BY (round - ?) / ? ORDER BY round", (first, every)
        )
        return tuple(map(_traffic_point, found))
    span = db.execute(
        "SELECT min(round), max(round) FROM replica_rounds WHERE replica = ?", (replica,)
    ).fetchone()
    first, every = stride(span, most)
    if position is None:
        found = db.execute(
            f"SELECT {columns} FROM replica_rounds WHERE replica = ? GROUP BY (round - ?) / ? ORDER BY round",
            (replica, first, every),
        )
    else:
        # One round for each point: their means would take a look-up for each round.
        found = db.execute(
            "WITH RECURSIVE wanted (round) AS (SELECT ?1 UNION ALL SELECT round + ?2 FROM wanted"
            " WHERE round + ?2 <= ?3)"
            f" SELECT round, 1, at, 1, {_TRAFFIC} FROM wanted CROSS JOIN measurements USING (round)"
            " WHERE replica = ?4 AND position = ?5 ORDER BY round",
            (first, every, span[1] or 0, replica, position),
        )
    return tuple(map(_traffic_point, found))


def _traffic_point(row: Row) -> TrafficPoint:
    """The sums of several rounds as the mean of one."""
    round_number, rounds, at, members, *sums = row
    means = [round(each / rounds) for each in sums]
    return TrafficPoint(round_number, rounds, seconds(at), round(members / rounds), traffic(means))


def members(db: sqlite3.Connection, where: str, *values: int) -> tuple[MemberFigures, ...]:
    """Measurements. `where`: a clause of our own, with its order."""
    found = db.execute(
        "SELECT m.round, m.at, p.peer, m.replica, m.position, m.is_last, m.train_loss, m.validation_loss,"
        " m.tokens, m.inner, m.outer, m.compute, m.gradient_norm, m.steps, m.extra_steps, m.microbatches,"
        " m.progress_norm, m.error_norm / nullif(m.error_norm + m.progress_norm, 0),"
        f" {', '.join(f'm.{name}' for name in TRAFFIC)}"
        f" FROM measurements AS m JOIN peers AS p ON p.number = m.peer WHERE {where}",
        values,
    )
    return tuple(_figures(row) for row in found)


def _figures(row: Row) -> MemberFigures:
    return MemberFigures(
        round_number=row[0],
        at=seconds(row[1]),
        peer=PeerId(row[2]),
        replica=row[3],
        position=row[4],
        is_last=bool(row[5]),
        train_loss=row[6],
        validation_loss=row[7],
        tokens=row[8],
        inner_seconds=seconds(row[9]),
        outer_seconds=seconds(row[10]),
        compute_seconds=seconds(row[11]),
        gradient_norm=row[12],
        steps=row[13],
        extra_steps=row[14],
        microbatches=row[15],
        progress_norm=row[16] or None,
        error_share=row[17],
        traffic=traffic(row[18:]),
    )


_PLAN = "SELECT epoch, sequence, at, from_round, replicas, members, reason"


def plans(db: sqlite3.Connection, before: int | None, most: int) -> tuple[PlanSummary, ...]:
    found = db.execute(
        f"{_PLAN} FROM plans WHERE ?1 IS NULL OR epoch < ?1 ORDER BY epoch DESC LIMIT ?2",
        (before, within(most)),
    )
    return tuple(_plan(row) for row in found)


def plan(db: sqlite3.Connection, epoch: int) -> PlanDetail | None:
    row = db.execute(f"{_PLAN}, first_sample, body FROM plans WHERE epoch = ?", (epoch,)).fetchone()
    if row is None:
        return None
    *columns, first_sample, body = row
    about, replicas = _plan(tuple(columns)), plan_body.decode(body, names_of(db))
    return PlanDetail(about, Plan(epoch, about.from_round, first_sample, replicas, about.reason))


def _plan(row: Row) -> PlanSummary:
    epoch, sequence, at, *rest = row
    return PlanSummary(epoch, sequence, seconds(at), *rest)


def names_of(db: sqlite3.Connection) -> Mapping[int, PeerId]:
    """The peer ids by number."""
    return {number: PeerId(peer) for number, peer in db.execute("SELECT number, peer FROM peers")}
