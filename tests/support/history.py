"""Histories for tests: written from events without a thread, dumped, and recounted from the events alone."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from coordinator.run.state.apply import apply
from coordinator.run.state.events import (
    Event,
    PeerSeen,
    PlanAdopted,
    RoundDecided,
)
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Step
from coordinator.store.history import SqliteHistory
from coordinator.store.history_answers import Page
from coordinator.store.history_file import Changes, HistoryFile
from coordinator.store.history_fold import changes_of, changes_of_measurement
from protocol.math.turns import is_due
from protocol.spec.run import RunSpec
from protocol.status import Measurement
from protocol.types import Aborted, Committed, PeerId, Skipped, entries_of
from tests.builders import decisions_in
from tests.support.coordinator_run import Run

Counts = tuple[int, int, int]
"""Stage tokens, stage rounds, payload bytes."""


def stored(events: Iterable[Event]) -> list[Event]:
    """The events that a log would hold."""
    return [event for event in events if not isinstance(event, PeerSeen)]


def steps_of(spec: RunSpec, events: Iterable[Event]) -> Iterator[Step]:
    """Each event with the states before and after it."""
    state = State(spec, spec.name)
    for event in events:
        before, state = state, apply(state, event)
        yield Step(event, before, state)


def write_history(
    path: Path,
    spec: RunSpec,
    events: Sequence[Event],
    measurements: Sequence[tuple[float, Measurement]] = (),
    batch: int = 100,
) -> SqliteHistory:
    """Add to the file at `path` what it lacks of `events`, in the order of their log, then `measurements`."""
    changes: list[Changes] = []
    with HistoryFile(path, spec, spec.name) as file:
        former = file.sequence
        for sequence, step in enumerate(steps_of(spec, events), start=1):
            if sequence > former:
                changes.append(tuple(changes_of(sequence, *step)))
            if sequence % batch == 0 or sequence == len(events):
                file.write(changes, sequence, step.event.at)
                changes = []
        for at, measurement in measurements:
            file.write([tuple(changes_of_measurement(at, measurement))])
    return SqliteHistory(path)


def dump(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables, sorted; but for what a start needs of the metrics file."""
    with closing(sqlite3.connect(path)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        db.execute("UPDATE run SET measured = 0")
        return {name: sorted(db.execute(f"SELECT * FROM {name}"), key=repr) for name in tables}


def recount(spec: RunSpec, events: Iterable[Event]) -> dict[PeerId, Counts]:
    """What each peer is credited with, from the decisions and plans alone, in the simplest way."""
    plans, found = {}, defaultdict(lambda: (0, 0, 0))
    for event in events:
        if isinstance(event, PlanAdopted):
            plans[event.plan.epoch] = event.plan
        elif isinstance(event, RoundDecided):
            for entry in entries_of(event.decision):
                payload = entry.descriptor
                replica = plans[payload.epoch].replica_of(payload.owner)
                microbatches = (replica.microbatches or spec.inner.microbatches) if replica else 0
                samples = spec.inner.steps * microbatches * spec.inner.microbatch_size
                share = payload.weight / replica.weight if replica else 0.0
                tokens, rounds, nbytes = found[payload.owner]
                trained = 1
                while trained < payload.round_number and not is_due(
                    spec, payload.stage, payload.round_number - trained
                ):
                    trained += 1
                tokens += round(share * samples * spec.model.context * trained)
                found[payload.owner] = tokens, rounds + 1, nbytes + payload.nbytes
    return dict(found)


def credited(history: SqliteHistory) -> dict[PeerId, Counts]:
    """What the history credits to the peers that have any credit."""
    found = history.credits(page=Page(most=1000)).credits
    return {
        each.peer: (each.stage_tokens, each.stage_rounds, each.payload_bytes)
        for each in found
        if each.stage_rounds
    }


def check_history(run: Run, restarts: Iterable[int] = ()) -> None:
    """The history of `run`, whose coordinator was killed after so many events, agrees with its events.

    It is the same when it is written in one go.
    """
    events = stored(run.events)
    with tempfile.TemporaryDirectory() as folder:
        grown, whole = Path(folder, "grown.sqlite"), Path(folder, "whole.sqlite")
        for length in (*restarts, len(events)):
            history = write_history(grown, run.spec, events[:length], batch=7)
        write_history(whole, run.spec, events)
        assert dump(grown) == dump(whole)
        credits, totals = history.credits(), history.run()
        assert credited(history) == recount(run.spec, events)
        assert credits.tokens == totals.tokens == run.state.tokens
        assert credits.stage_tokens == sum(n for n, *_ in credited(history).values())
        committed = decisions_in(events, Committed)
        assert credits.stage_rounds == sum(len(decision.entries) for decision in committed)
        assert run.state.aborted == len(decisions_in(events, Aborted))
        assert totals.sequence == len(events)
        _check_rounds(run, history)


def _check_rounds(run: Run, history: SqliteHistory) -> None:
    """Each decision is there, and says the same about each payload."""
    for (stage, round_number), decision in run.state.decisions.items():
        detail = history.round(round_number)
        assert detail is not None
        found = next(each for each in detail.stages if each.summary.stage == stage)
        counted = {each.peer for each in found.contributions if each.standing == "counted"}
        assert counted == {entry.descriptor.owner for entry in entries_of(decision)}
        assert found.summary.counted == len(counted)
        assert found.summary.tokens == sum(each.tokens for each in found.contributions)
        is_skipped = isinstance(decision, Skipped)
        is_committed = isinstance(decision, Committed)
        assert found.summary.outcome == (
            "committed" if is_committed else "skipped" if is_skipped else "aborted"
        )
        standings = {each.standing for each in found.contributions}
        assert "offered" not in standings
        assert all(each.cause for each in found.contributions if each.standing in ("left out", "missing"))
        hosts = {replica.host_of(stage).peer for replica in run.state.plan_for(round_number).replicas}
        assert is_skipped or hosts <= {each.peer for each in found.contributions}
