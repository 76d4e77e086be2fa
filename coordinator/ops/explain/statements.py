"""The kinds of statements that answers are made of, and how one is made.

A statement is a record: its code, and the fields that the code uses. Its sentence is made last, in
:mod:`coordinator.ops.explain.sentences`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from math import isfinite
from typing import Any

from coordinator.store.history_tables import MemberFigures
from protocol.status import Statement

MOST_CITED = 12
"""Events that one statement names."""
MOST_DETAIL = 400
"""Letters of the words of others in one statement."""


class Code(StrEnum):
    """The kind of a statement, with the figures that it uses beside the fields that it names."""

    EVENT = "event"  # detail: what it says; at: Unix time; ago; after: seconds since the round began
    CAUSE = "cause"  # cause
    REMEDY = "remedy"  # detail: what is to be mended; seconds, factor, balance
    MORE = "more"  # count
    # What the run waits for.
    RUN = "run"  # cause; detail: the message of the run
    GROUP_CLOSED = "group-closed"  # stages, ago
    OFFERED = "offered"  # ago, remaining
    LATE = "late"  # replicas, seconds, usual, step, steps
    SILENT = "silent"  # peers, seconds, lost_after
    ABORTS = "aborts"  # rounds, compared
    IDLE = "idle"  # peers, spares
    # Predictions. detail: the kind of a bottleneck, peers: its ends.
    UNMEASURED = "unmeasured"
    PREDICTION = "prediction"  # seconds, inner, exchange
    FASTER = "faster"  # rate, step, step_now, round, round_now
    # A round.
    ROUND = "round"  # rounds, seconds, usual, compared, decided
    ROLLBACK = "rollback"  # rounds: its own and the restored one
    COMMITTED = "committed"  # stages, all, detail
    ABORTED = "aborted"  # stages, all, detail
    SKIPPED = "skipped"  # stages, all
    MORE_TIME = "more-time"  # detail: the phase; extra, seconds, usual
    TIMES = "times"  # inner, offer, group, decision
    RESTARTED = "restarted"  # seconds
    STOOD_STILL = "stood-still"  # detail, seconds
    NO_OFFER = "no-offer"  # replicas, peers, detail, usual
    WITHHELD = "withheld"  # replicas, peers, known: members that have told what they measured
    BROKEN = "broken"  # replicas, peers: what they offered counts; stages: of the others; done, steps
    NONFINITE = "nonfinite"  # rounds, replicas, peers: one of each; step, done: the steps that count
    LAST = "last"  # replicas: it and the one before; seconds, lag, usual
    FIRST_ROUND = "first-round"
    COMPUTED = "computed"  # peers, inner, compute
    ALWAYS_SLOW = "always-slow"  # seconds
    NO_REPORT = "no-report"  # stages, peers, seconds
    LAST_REPORT = "last-report"  # stages, peers, lag, uplink, downlink
    NOT_COUNTED = "not-counted"  # replicas, peers, stages, detail: why
    # A peer.
    PEER = "peer"  # role, detail: its activity or exclusion; replicas, stages
    ENROLLED = "enrolled"  # peers
    ASSIGNED = "assigned"  # rounds, replicas, epoch, width, upstream, downstream: k, 0 if uncompressed
    NO_VACANCY = "no-vacancy"  # detail
    RESERVED_SOON = "reserved-soon"
    BEHIND = "behind"  # stages, rounds: the attested one of each, or -1; least
    FLOPS = "flops"  # peers, own, usual
    UPLINK = "uplink"  # peers, own, usual
    PACE = "pace"  # replicas, own, usual
    COUNTED = "counted"  # rounds


def say(code: Code, *events: int | None, detail: str = "", **fields: Any) -> Statement:
    """A statement with `code`, the events that are known, and the fields of :class:`Statement`.

    Other names are those of figures; a figure that is None or not finite is left out.
    """
    names = Statement.__dataclass_fields__
    figures = {name: value for name, value in fields.items() if name not in names}
    return Statement(
        code.value,
        events=tuple(sorted({each for each in events if each})[:MOST_CITED]),
        detail=printable(detail),
        figures={name: float(each) for name, each in figures.items() if each is not None and isfinite(each)},
        **{name: _frozen(value) for name, value in fields.items() if name in names},
    )


def nonfinite(figures: MemberFigures, *events: int | None) -> Statement:
    """In which step of a round the values of a member were not finite, and how many steps of it count."""
    who: dict[str, Any] = {"rounds": (figures.round_number,), "replicas": (figures.replica,)}
    done: dict[str, Any] = {"step": figures.nonfinite_step, "done": figures.steps}
    return say(Code.NONFINITE, *events, peers=(figures.peer,), **who, **done)


def printable(text: str, most: int = MOST_DETAIL) -> str:
    """`text` with at most `most` letters, all printable."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text[: most + 1])
    return clean if len(clean) <= most else f"{clean[: most - 4]} ..."


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
