"""Decisions as flat records: the form that a message and a stored event give to every kind of decision."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.types import (
    Aborted,
    Committed,
    CommittedResult,
    Decision,
    ManifestEntry,
    RolledBack,
    entries_of,
)


@dataclass(frozen=True)
class FlatDecision:
    """The fields of all kinds of decisions. A skipped stage has those of an aborted one."""

    stage: int
    round_number: int
    committed: bool
    entries: tuple[ManifestEntry, ...]
    next_epoch: int
    reason: str
    restore_round: int | None = None
    result: CommittedResult | None = None


def flat(decision: Decision) -> FlatDecision:
    return FlatDecision(
        decision.stage,
        decision.round_number,
        isinstance(decision, Committed),
        entries_of(decision),
        decision.next_epoch,
        decision.reason,
        decision.restore_round if isinstance(decision, RolledBack) else None,
        decision.result if isinstance(decision, Committed) else None,
    )


def decision_of(record: FlatDecision) -> Decision:
    """The inverse of :func:`flat`; Aborted for a skipped stage. ValueError for fields that contradict."""
    common = record.stage, record.round_number, record.next_epoch, record.reason
    if record.committed != bool(record.entries):
        raise ValueError(f"committed is {record.committed} with {len(record.entries)} payloads")
    restored = record.restore_round
    if restored is not None and (record.committed or restored >= record.round_number):
        raise ValueError(f"round {record.round_number} cannot restore round {restored}")
    if record.result is not None and not record.committed:
        raise ValueError("an aborted round with a result")
    if record.committed:
        return Committed(*common, record.entries, record.result)
    return Aborted(*common) if restored is None else RolledBack(*common, restored)
