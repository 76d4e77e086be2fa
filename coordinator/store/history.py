"""Answers questions about the past of a run from ``history.sqlite``, which its coordinator may be writing.

A query may be called from any thread, and waits for a disk: never call it on an event loop. Lists are bounded
by MOST_ROWS, those of one round by the members of its plan. Every query raises HetnodeError NO_HISTORY where
the history cannot be read; some events may still be on their way to it.

One file because a query is few lines, and what it answers is a record beside it.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, Protocol, TypeVar

from coordinator.store.history_answers import (
    FIRST_PAGE,
    Credit,
    CreditOrder,
    Credits,
    LossPoint,
    Page,
    PeerDetail,
    PhaseSeconds,
    RoundDetail,
    RoundSummary,
    SpeedPoint,
    StageRound,
    TrafficPoint,
)
from coordinator.store.history_file import reading
from coordinator.store.history_sql import SELECTED, row_of
from coordinator.store.history_tables import (
    AdoptedPlan,
    Contribution,
    EstimatePoint,
    EvaluatedFigure,
    EvaluatedSample,
    JournalLine,
    Kind,
    MemberFigures,
    Omission,
    PeerTotals,
    RoundRow,
    RunTotals,
    StageRow,
    Standing,
    TableRow,
)
from protocol.errors import HetnodeError
from protocol.types import PeerId

T = TypeVar("T", bound=TableRow)

MOST_ROWS = 1000
"""Most rows or points that one query returns; a greater number counts as this."""
_MOST_FIGURES = 50_000
"""Of evaluations: a few peers, each with some names and metrics."""
_ABSENCES = (
    Kind.JOINED,
    Kind.LEFT,
    Kind.LOST,
    Kind.RETREATED,
    Kind.QUARANTINED,
    Kind.BANNED,
    Kind.LINK_FAILED,
    Kind.DIVERGED,
)
"""What keeps a member from the rest of its plan."""
_MARKS = ", ".join("?" for _ in _ABSENCES)
_WHOSE = "coalesce(owner, peer)"
"""The owner of a peer; a peer without an owner stands for itself."""
_OF_BEST = "max(iif(place = 1, {0}, NULL))".format
_SUMS = f"""SELECT {_OF_BEST("peer")} AS peer, {_OF_BEST("name")}, max(owner), count(*),
    sum(stage_tokens) AS stage_tokens, sum(stage_rounds) AS stage_rounds, sum(payload_bytes) AS payload_bytes,
    sum(link_bytes) AS link_bytes, min(first_round), max(last_round), max(credit_sequence),
    min(number) AS number
    FROM (SELECT *, row_number() OVER (PARTITION BY {_WHOSE} ORDER BY stage_tokens DESC, number) AS place
    FROM peers WHERE number > 0) GROUP BY {_WHOSE}"""
"""A row for each owner, and for each peer without one."""
_FOUND = "max(instr(lower(peer), ?) OR instr(lower(name), ?) OR instr(lower(owner), ?))"
_ORDERS = {
    CreditOrder.TOKENS: "stage_tokens DESC, number",
    CreditOrder.ROUNDS: "stage_rounds DESC, number",
    CreditOrder.PAYLOAD: "payload_bytes DESC, number",
    CreditOrder.LINK: "link_bytes DESC, number",
    CreditOrder.NAME: "peer",
}


class Writer(Protocol):
    """As :class:`coordinator.store.history_writer.HistoryWriter`."""

    @property
    def problem(self) -> str: ...

    def flush(self) -> None: ...


class SqliteHistory:
    """The history in the file at `path`, which need not be there yet.

    Args:
        writer: of the file, in the process of the coordinator.
    """

    def __init__(self, path: Path, writer: Writer | None = None) -> None:
        self.path = path
        self._writer = writer

    def catch_up(self) -> None:
        """Wait a short time until the newest events are here."""
        if self._writer is not None:
            self._writer.flush()

    @property
    def problem(self) -> str:
        """A sentence: why the history is not complete or cannot be read; "" if all is well."""
        if self._writer is not None and self._writer.problem:
            return self._writer.problem
        try:
            with reading(self.path):
                return ""
        except HetnodeError as error:
            return error.cause

    def run(self) -> RunTotals:
        with reading(self.path) as db:
            return _rows(db, RunTotals)[0]

    def replicas(self) -> tuple[int, ...]:
        """The indices of the replicas that have measured a round."""
        with reading(self.path) as db:
            # From one replica to the next in the index: DISTINCT would read all their rounds.
            found = db.execute(
                "WITH RECURSIVE known (replica) AS (SELECT min(replica) FROM replica_rounds UNION ALL"
                " SELECT (SELECT min(replica) FROM replica_rounds AS r WHERE r.replica > known.replica)"
                " FROM known WHERE known.replica IS NOT NULL)"
                " SELECT replica FROM known WHERE replica IS NOT NULL LIMIT ?",
                (MOST_ROWS,),
            )
            return tuple(replica for (replica,) in found)

    def losses(self, replica: int | None = None, most: int = 500) -> tuple[LossPoint, ...]:
        """By round, thinned to at most `most` points. `replica` None: the mean over all replicas."""
        # Division by zero gives NULL.
        if replica is None:
            table, own, least, greatest = "round_figures", "TRUE", "least", "greatest"
            loss, train = "validation_sum / losses", "train_sum / train_losses"
        else:
            table, own = "replica_rounds", f"replica = {int(replica)}"
            least = greatest = loss = "validation_loss"
            train = "train_loss"
        with reading(self.path) as db:
            found = db.execute(
                f"SELECT round_number, at, {loss}, {train}, thin.least, thin.greatest FROM"
                f" (SELECT max(round_number) AS last, min({least}) AS least, max({greatest}) AS greatest"
                f" FROM {table} WHERE {own} GROUP BY (round_number - ?) / ?) AS thin"
                f" JOIN {table} AS t ON t.round_number = thin.last WHERE {own} ORDER BY round_number",
                _stride(db, f"{table} WHERE {own}", most),
            )
            return tuple(LossPoint(*row) for row in found)

    def speed(self, most: int = 500) -> tuple[SpeedPoint, ...]:
        """Committed tokens per second by round, thinned to at most `most` points."""
        with reading(self.path) as db:
            found = db.execute(
                "SELECT max(round_number), count(*), min(began_at), max(decided_at), sum(tokens) FROM rounds"
                " WHERE decided_at IS NOT NULL GROUP BY (round_number - ?) / ? ORDER BY round_number",
                _stride(db, "rounds", most),
            )
            return tuple(_speed_point(*row) for row in found)

    def traffic(self, most: int = 500) -> tuple[TrafficPoint, ...]:
        """The traffic of all members by round, thinned to at most `most` points."""
        with reading(self.path) as db:
            found = db.execute(
                "SELECT max(round_number), count(*), avg(link_bytes), avg(link_bytes_dense),"
                " avg(payload_bytes), avg(payload_bytes_dense) FROM round_figures"
                " GROUP BY (round_number - ?) / ? ORDER BY round_number",
                _stride(db, "round_figures", most),
            )
            return tuple(TrafficPoint(row[0], row[1], *map(round, row[2:])) for row in found)

    def rounds(self, before: int | None = None, most: int = 50) -> tuple[RoundSummary, ...]:
        """The newest rounds first, from the one below `before` on; None: from the newest."""
        with reading(self.path) as db:
            return _summaries(db, "?1 IS NULL OR t.round_number < ?1", before, _within(most))

    def round(self, round_number: int) -> RoundDetail | None:
        """All about one round; None if it has not begun."""
        with reading(self.path) as db:
            found = _summaries(db, "t.round_number = ?", round_number, 1)
            return _detail(db, found[0]) if found else None

    def peer(self, peer: PeerId, most: int = 100) -> PeerDetail | None:
        """All about one peer, at most `most` rows of each list; None if it has never joined."""
        with reading(self.path) as db:
            found = db.execute("SELECT number FROM peers WHERE peer = ? AND number > 0", (peer,)).fetchone()
            if found is None:
                return None
            (totals,) = _rows(db, PeerTotals, "WHERE peer = ?", peer)
            own = "WHERE t.peer = ? ORDER BY"
            values = found[0], _within(most)
            newest = "AND standing IS NOT NULL ORDER BY t.round_number DESC, t.stage LIMIT ?"
            contributions = _rows(db, Contribution, f"WHERE t.peer = ? {newest}", *values)
            return PeerDetail(
                totals,
                _credit(totals),
                tuple(_rows(db, JournalLine, f"{own} t.sequence DESC LIMIT ?", *values)),
                tuple(_with_cause(db, each) for each in contributions),
                tuple(_rows(db, MemberFigures, f"{own} t.round_number DESC LIMIT ?", *values)),
                _estimates(db, *values),
            )

    def credits(
        self, order: CreditOrder = CreditOrder.TOKENS, page: Page = FIRST_PAGE, find: str = ""
    ) -> Credits:
        """A page of all owners, and peers without one; with `find` those with this text in name or id."""
        with reading(self.path) as db:
            (run,) = _rows(db, RunTotals)
            peers, owners, *sums = db.execute(
                f"SELECT count(*), count(DISTINCT {_WHOSE}), total(stage_rounds), total(payload_bytes),"
                " total(link_bytes) FROM peers WHERE number > 0"
            ).fetchone()
            limits = _within(page.most), max(0, page.skip)
            wanted = f"HAVING {_FOUND}" if find else ""
            order_by = f"{wanted} ORDER BY {_ORDERS[order]} LIMIT ? OFFSET ?"
            found = db.execute(f"{_SUMS} {order_by}", (*[find.lower()] * (3 * bool(find)), *limits))
            return Credits(
                run=run.run or "",
                sequence=run.sequence,
                peers=peers,
                stages=run.stages or 0,
                tokens=run.tokens,
                stage_tokens=run.stage_tokens,
                stage_rounds=int(sums[0]),
                payload_bytes=int(sums[1]),
                link_bytes=int(sums[2]),
                credits=tuple(starmap(_summed, found)),
                owners=owners,
            )

    def credit(self, peer: PeerId) -> tuple[int, str, Credit | None]:
        """The event up to which credit counts; name and credit of `peer`, None if it has never joined."""
        with reading(self.path) as db:
            (run,) = _rows(db, RunTotals)
            found = _rows(db, PeerTotals, "WHERE number > 0 AND peer = ?", peer)
            return run.sequence, (found[0].name or "") if found else "", _credit(found[0]) if found else None

    def summed(self, credit: Credit) -> Credit:
        """The credit of the owner of that peer; without an owner, its own."""
        with reading(self.path) as db:
            (found,) = db.execute(f"{_SUMS} HAVING {_WHOSE} = ?", (credit.owner or credit.peer,))
            return _summed(*found)

    def rank(self, credit: Credit) -> tuple[int, int]:
        """The place of :meth:`summed` by stage tokens, 1 being the most, and how many have any."""
        sums = f"SELECT sum(stage_tokens) AS tokens FROM peers WHERE number > 0 GROUP BY {_WHOSE}"
        own = self.summed(credit).stage_tokens
        with reading(self.path) as db:
            more, owners = db.execute(
                f"SELECT total(tokens > ?), count(*) FROM ({sums}) WHERE tokens > 0", (own,)
            ).fetchone()
        return int(more) + 1, max(1, owners)

    def evaluations(self, most: int = 500) -> tuple[EvaluatedFigure, ...]:
        """By name, metric and peer, then by round; of each name at most `most` rounds."""
        with reading(self.path) as db:
            chosen = (
                "(t.name, t.round_number) IN (SELECT name, max(round_number) FROM evaluations"
                " GROUP BY name, (round_number - ?) / ?)"
            )
            order = "ORDER BY t.name, t.metric, t.peer, t.round_number LIMIT ?"
            stride = _stride(db, "evaluations", most)
            return tuple(_rows(db, EvaluatedFigure, f"WHERE {chosen} {order}", *stride, _MOST_FIGURES))

    def samples(self, rounds: int = 10) -> tuple[EvaluatedSample, ...]:
        """Those of the newest rounds that have any, the newest first."""
        with reading(self.path) as db:
            newest = "SELECT DISTINCT round_number FROM samples ORDER BY round_number DESC LIMIT ?"
            order = "ORDER BY t.round_number DESC, t.peer, t.name, t.number LIMIT ?"
            chosen = f"WHERE t.round_number IN ({newest}) {order}"
            return tuple(_rows(db, EvaluatedSample, chosen, rounds, MOST_ROWS))

    def plan(self, epoch: int) -> AdoptedPlan | None:
        with reading(self.path) as db:
            return next(iter(_rows(db, AdoptedPlan, "WHERE epoch = ?", epoch)), None)

    def journal(
        self, first: int, last: int, most: int = MOST_ROWS, kinds: Sequence[Kind] = ()
    ) -> tuple[JournalLine, ...]:
        """The last `most` lines about the events `first` to `last`, in order; of `kinds` alone if given."""
        alike = f" AND t.kind IN ({', '.join('?' for _ in kinds)})" if kinds else ""
        within = f"WHERE t.sequence BETWEEN ? AND ?{alike} ORDER BY t.sequence DESC LIMIT ?"
        with reading(self.path) as db:
            return tuple(reversed(_rows(db, JournalLine, within, first, last, *kinds, _within(most))))


def _rows(db: sqlite3.Connection, table: type[T], rest: str = "", *values: Any) -> list[T]:
    """The rows of `table` in which `rest` holds: clauses of our own, in which the table has the name t."""
    return [row_of(table, row) for row in db.execute(f"{SELECTED[table]} {rest}", values)]


def _within(most: int) -> int:
    """`most`, as far as a query returns so many rows."""
    return max(1, min(most, MOST_ROWS))


def _stride(db: sqlite3.Connection, rows: str, most: int) -> tuple[int, int]:
    """The first round of `rows`, and of how many rounds a point must stand, for at most `most` points."""
    # One query each: SQLite looks a single minimum up in an index.
    (first,), (last,) = (
        db.execute(f"SELECT {each}(round_number) FROM {rows}").fetchone() for each in ("min", "max")
    )
    return (0, 1) if first is None else (first, (last - first) // _within(most) + 1)


def _speed_point(round_number: int, rounds: int, began: float, decided: float, tokens: int) -> SpeedPoint:
    time = max(0.0, decided - began)
    return SpeedPoint(round_number, rounds, decided, tokens, time, tokens / time if time else 0.0)


def _summaries(db: sqlite3.Connection, where: str, *values: int | None) -> tuple[RoundSummary, ...]:
    """The begun rounds in which `where` holds, the newest first; the last of `values` is how many at most."""
    found = _rows(
        db,
        RoundRow,
        f"WHERE ({where}) AND begins > 0 ORDER BY t.round_number DESC LIMIT ?{len(values)}",
        *values,
    )
    if not found:
        return ()
    span = found[-1].round_number, found[0].round_number
    stages = defaultdict(list)
    for each in _rows(db, StageRow, "WHERE round_number BETWEEN ? AND ? ORDER BY round_number, stage", *span):
        stages[each.round_number].append(each)
    losses = dict(
        db.execute(
            "SELECT round_number, validation_sum / losses FROM round_figures"
            " WHERE round_number BETWEEN ? AND ?",
            span,
        )
    )
    return tuple(
        RoundSummary(
            each.round_number,
            each.epoch or 0,
            began := each.began_at or 0.0,
            each.began_sequence or 0,
            each.first_began_at or 0.0,
            each.first_sequence or 0,
            each.begins - 1,
            None if each.decided_at is None else each.decided_at - began,
            each.tokens,
            losses.get(each.round_number),
            tuple(stages[each.round_number]),
        )
        for each in found
    )


def _detail(db: sqlite3.Connection, summary: RoundSummary) -> RoundDetail:
    number, parts = summary.round_number, defaultdict(list)
    in_order = "WHERE t.round_number = ? AND standing IS NOT NULL ORDER BY t.stage, t.replica, 3"
    for each in _rows(db, Contribution, in_order, number):
        parts[each.stage].append(_with_cause(db, each))
    stages = tuple(
        StageRound(each, _phases(summary.began_at, each), tuple(parts[each.stage])) for each in summary.stages
    )
    members = "WHERE t.round_number = ? ORDER BY t.replica, t.position, t.at"
    return RoundDetail(summary, stages, tuple(_rows(db, MemberFigures, members, number)))


def _phases(began: float, stage: StageRow) -> PhaseSeconds:
    """Each phase from the end of the one before it. A phase without an end of its own took no time."""
    offered, closed, decided = stage.first_offer_at, stage.closed_at, stage.decided_at
    if offered is None and decided is not None:
        # No payload came: the round waited for offers until its decision.
        return PhaseSeconds(None, decided - began, None, None)
    reported = stage.last_report_at
    if decided is not None and closed is not None and reported is None:
        reported = closed  # nobody reported: the decision waited for all of this time
    ends = (began, offered, closed, reported if decided is not None else None, decided)
    return PhaseSeconds(
        *(None if one is None or end is None else max(0.0, end - one) for one, end in pairwise(ends))
    )


def _with_cause(db: sqlite3.Connection, part: Contribution) -> Contribution:
    """`part` with the event that says why it was not counted."""
    if part.standing is Standing.LEFT_OUT:
        where = part.peer, part.cause, part.round_number - (part.cause == Kind.DIVERGED), part.stage
        found = db.execute(
            "SELECT max(j.sequence) FROM journal AS j JOIN peers AS p ON p.number = j.peer"
            " WHERE p.peer = ? AND j.kind = ? AND j.round_number = ? AND j.stage = ?",
            where,
        ).fetchone()
        return replace(part, culprit=part.peer, cause_sequence=found[0] or _decided(db, part)[0])
    if part.standing is not Standing.MISSING:
        return part
    until, since = _decided(db, part)
    members = db.execute(
        "SELECT DISTINCT c.peer FROM contributions AS c WHERE c.round_number = ? AND c.replica = ?"
        " UNION SELECT m.peer FROM measurements AS m WHERE m.round_number = ? AND m.replica = ?",
        2 * (part.round_number, part.replica),
    )
    (own,) = db.execute("SELECT number FROM peers WHERE peer = ?", (part.peer,)).fetchone()
    # What has happened to the member itself comes before what has happened to its replica.
    for number in (own, *(each for (each,) in members if each != own)):
        newest = _rows(
            db,
            JournalLine,
            f"WHERE t.peer = ? AND kind IN ({_MARKS}) AND t.sequence > ? AND t.sequence < ?"
            " ORDER BY t.sequence DESC LIMIT 1",
            *(number, *_ABSENCES, since, until),
        )
        for line in newest:
            return replace(
                part, cause=line.kind, cause_sequence=line.sequence, culprit=line.peer, detail=line.text
            )
    return replace(part, cause=Omission.NO_OFFER, cause_sequence=until)


def _decided(db: sqlite3.Connection, part: Contribution) -> tuple[int, int]:
    """The events of the decision about `part`, and of its plan."""
    found: tuple[int, int] = db.execute(
        "SELECT coalesce(s.decided_sequence, 0), coalesce(p.sequence, 0) FROM rounds AS r"
        " JOIN stage_rounds AS s ON s.round_number = r.round_number AND s.stage = ?2"
        " LEFT JOIN plans AS p ON p.epoch = r.epoch WHERE r.round_number = ?1",
        (part.round_number, part.stage),
    ).fetchone()
    return found


def _credit(totals: PeerTotals) -> Credit:
    rounds = (totals.first_round or 0, totals.last_round or 0, totals.credit_sequence or 0)
    bytes_of = totals.payload_bytes, int(totals.link_bytes)
    counts = totals.stage_tokens, totals.stage_rounds
    return Credit(totals.peer, *counts, *bytes_of, *rounds, totals.name or "", totals.owner or "")


def _summed(
    peer: PeerId, name: str | None, owner: str | None, nodes: int, tokens: int, rounds: int, *others: Any
) -> Credit:
    payloads, links, first, last, sequence, _ = others
    counted = int(payloads), int(links), first or 0, last or 0, sequence or 0
    return Credit(peer, tokens, rounds, *counted, name or "", owner or "", nodes)


def _estimates(db: sqlite3.Connection, number: int, most: int) -> tuple[EstimatePoint, ...]:
    """Thinned to `most` points; the newest is among them."""
    (count,) = db.execute("SELECT count(*) FROM estimates WHERE peer = ?", (number,)).fetchone()
    every = -(-count // most) or 1
    found = _rows(db, EstimatePoint, "WHERE t.peer = ? ORDER BY t.sequence DESC", number)
    return tuple(reversed(found[::every]))
