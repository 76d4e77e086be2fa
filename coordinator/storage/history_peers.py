"""Queries of the history about peers: their sessions, their part in the rounds, their credit."""

from __future__ import annotations

import sqlite3

from coordinator.history.peer_records import (
    Credit,
    CreditOrder,
    Credits,
    EstimatePoint,
    PeerChange,
    PeerDetail,
    PeerPage,
    PeerSummary,
    Session,
)
from coordinator.history.records import Page
from coordinator.storage.history_reading import Row, optional_seconds, part, seconds, within
from coordinator.storage.history_rounds import contributions
from coordinator.storage.history_runs import members
from protocol.types import PeerId, Reachability, Role

_CREDIT = (
    "peer, stage_tokens, stage_rounds, payload_bytes, link_bytes, first_round, last_round, credit_sequence"
)
_PEER = (
    "SELECT number, peer, role, is_here, sessions, first_at, last_at, last_change, last_sequence, strikes,"
    f" failures, {_CREDIT} FROM peers"
)
_ORDERS = {
    CreditOrder.TOKENS: "stage_tokens DESC, number",
    CreditOrder.ROUNDS: "stage_rounds DESC, number",
    CreditOrder.PAYLOAD: "payload_bytes DESC, number",
    CreditOrder.LINK: "link_bytes DESC, number",
    CreditOrder.NAME: "peer",
}


def peers(db: sqlite3.Connection, page: Page) -> PeerPage:
    (total,) = db.execute("SELECT count(*) FROM peers").fetchone()
    found = db.execute(f"{_PEER} ORDER BY number LIMIT ? OFFSET ?", part(page))
    return PeerPage(total, tuple(_peer(row) for row in found))


def peer_detail(db: sqlite3.Connection, peer: PeerId, most: int) -> PeerDetail | None:
    row = db.execute(f"{_PEER} WHERE peer = ?", (peer,)).fetchone()
    if row is None:
        return None
    about, most = _peer(row), within(most)
    sessions = db.execute(
        "SELECT joined_at, joined_sequence, role, device, reachability, left_at, left_sequence, ending,"
        " reason FROM sessions WHERE peer = ? ORDER BY joined_sequence DESC LIMIT ?",
        (about.number, most),
    )
    changes = db.execute(
        "SELECT sequence, at, round, kind, text FROM changes WHERE peer = ? ORDER BY sequence DESC LIMIT ?",
        (about.number, most),
    )
    newest = "c.peer = ? ORDER BY c.round DESC, c.stage LIMIT ?"
    return PeerDetail(
        summary=about,
        sessions=tuple(_session(each) for each in sessions),
        changes=tuple(PeerChange(each[0], seconds(each[1]), *each[2:]) for each in changes),
        contributions=tuple(contributions(db, newest, about.number, most)),
        figures=members(db, "m.peer = ? ORDER BY m.round DESC LIMIT ?", about.number, most),
        estimates=_estimates(db, about.number, most),
    )


def credits(db: sqlite3.Connection, order: CreditOrder, page: Page) -> Credits:
    run, sequence, stages, tokens = db.execute("SELECT run, sequence, stages, tokens FROM run").fetchone()
    sums = db.execute(
        "SELECT count(*), total(stage_tokens), total(stage_rounds), total(payload_bytes), total(link_bytes)"
        " FROM peers"
    ).fetchone()
    found = db.execute(f"SELECT {_CREDIT} FROM peers ORDER BY {_ORDERS[order]} LIMIT ? OFFSET ?", part(page))
    return Credits(
        run=run,
        sequence=sequence,
        peers=sums[0],
        stages=stages,
        tokens=tokens,
        stage_tokens=int(sums[1]),
        stage_rounds=int(sums[2]),
        payload_bytes=int(sums[3]),
        link_bytes=int(sums[4]),
        credits=tuple(_credit(row) for row in found),
    )


def _peer(row: Row) -> PeerSummary:
    return PeerSummary(
        number=row[0],
        peer=PeerId(row[1]),
        role=Role(row[2]),
        is_here=bool(row[3]),
        sessions=row[4],
        first_at=seconds(row[5]),
        last_at=seconds(row[6]),
        last_change=row[7],
        last_sequence=row[8],
        strikes=row[9],
        failures=row[10],
        credit=_credit(row[11:]),
    )


def _credit(row: Row) -> Credit:
    name, tokens, rounds, payload_bytes, link_bytes, *rest = row
    return Credit(PeerId(name), tokens, rounds, payload_bytes, int(link_bytes), *rest)


def _session(row: Row) -> Session:
    joined_at, joined_sequence, role, device, reachability, left_at, left_sequence, end, reason = row
    return Session(
        joined_at=seconds(joined_at),
        joined_sequence=joined_sequence,
        role=Role(role),
        device=device,
        reachability=None if reachability is None else Reachability(reachability),
        left_at=optional_seconds(left_at),
        left_sequence=left_sequence,
        end=end,
        reason=reason,
    )


def _estimates(db: sqlite3.Connection, number: int, most: int) -> tuple[EstimatePoint, ...]:
    """Thinned to `most` points; the newest is among them."""
    (count,) = db.execute("SELECT count(*) FROM estimates WHERE peer = ?", (number,)).fetchone()
    found = db.execute(
        "SELECT sequence, at, flops, uplink, downlink, round_trip, microbatch_seconds FROM"
        " (SELECT *, row_number() OVER (ORDER BY sequence DESC) - 1 AS place FROM estimates WHERE peer = ?)"
        " WHERE place % ? = 0 ORDER BY sequence",
        (number, -(-count // most) or 1),
    )
    # What was not finite is stored as NULL.
    return tuple(
        EstimatePoint(row[0], seconds(row[1]), *(value or 0.0 for value in row[2:])) for row in found
    )
