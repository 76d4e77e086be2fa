"""The history file: complete after every kind of end, and never the reason that a run ends."""

from __future__ import annotations

import logging
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from coordinator.run.state.events import Event
from coordinator.store import history_writer
from coordinator.store.event_codec import encode
from coordinator.store.history import SqliteHistory
from coordinator.store.history_writer import HistoryWriter
from coordinator.store.metrics import MetricsFile
from protocol.spec.run import RunSpec
from protocol.status import Measurement
from tests.builders import keyed, spec_of
from tests.support.coordinator_run import leave, play_rounds, started_and_attested
from tests.support.history import dump, steps_of, stored, write_history
from tests.support.paths import ROOT

MEASURED = [
    (1000.0 + round_number, Measurement(keyed(i).peer, round_number, i, 0, 2.0, 3.0 + i, 512, complete=True))
    for round_number in range(3)
    for i in range(2)
]


@cache
def run_of(rounds: int = 3) -> tuple[RunSpec, list[Event]]:
    run = started_and_attested(2, 1)
    play_rounds(run, rounds)
    leave(run, keyed(0))
    play_rounds(run)
    return run.spec, stored(run.events)


def writer(
    folder: Path, events: Sequence[Event], spec: RunSpec | None = None, measured: int = 0
) -> HistoryWriter:
    """Not started yet, for a log with `events`. The metrics file has MEASURED up to `measured`."""
    spec = spec or run_of()[0]
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    with MetricsFile(metrics) as file:
        for at, each in MEASURED[:measured]:
            file.record_measurement(at, each)
    times = dict(enumerate((event.at for event in events), start=1))
    return HistoryWriter(folder / "history.sqlite", spec, spec.name, times.get, metrics, file.size)


def started(history: HistoryWriter, events: Sequence[Event], spec: RunSpec | None = None) -> HistoryWriter:
    """It has caught up with the log `events`."""
    history.start()
    for step in steps_of(spec or run_of()[0], events):
        history.catch_up(*step)
    history.has_caught_up()
    return history


def record(history: HistoryWriter, events: Sequence[Event], after: int) -> None:
    """Record `events` but for the first ones."""
    for step in [*steps_of(run_of()[0], events)][after:]:
        history.record(*step)


def finished(
    folder: Path, events: Sequence[Event], spec: RunSpec | None = None, measured: int = 0
) -> HistoryWriter:
    history = started(writer(folder, events, spec, measured), events, spec)
    history.close(None)
    return history


def expected(tmp_path: Path, measured: int = 0) -> dict[str, list[tuple[object, ...]]]:
    path = tmp_path / "expected.sqlite"
    write_history(path, *run_of(), MEASURED[:measured])
    return dump(path)


@pytest.mark.parametrize("known", [6, 40, None])
def test_what_the_log_holds_and_what_follows_are_one_history(tmp_path: Path, known: int | None) -> None:
    _, events = run_of()
    history = started(writer(tmp_path, events[:known], measured=2), events[:known])
    record(history, events, len(events[:known]))
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.on_measurement = history.record_measurement
        for at, each in MEASURED[2:]:
            metrics.record_measurement(at, each)
    history.close(None)
    assert not history.problem
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path, len(MEASURED))
    assert [path.name for path in tmp_path.glob("history*")] == ["history.sqlite"], "one plain file is left"


def test_a_later_start_adds_what_is_missing(tmp_path: Path) -> None:
    _, events = run_of()
    for length, measured in ((30, 1), (30, 3), (75, 3), (len(events), len(MEASURED))):
        assert not finished(tmp_path, events[:length], measured=measured).problem
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path, len(MEASURED))


def test_a_measurement_that_comes_twice_counts_once(tmp_path: Path) -> None:
    _, events = run_of()
    finished(tmp_path, events, measured=4)
    history = started(writer(tmp_path, events, measured=4), events)
    for at, each in MEASURED[:4]:  # the coordinator has forgotten that the members told it
        history.record_measurement(at + 100, replace(each, validation_loss=9.0), 1)
    history.close(None)
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path, 4)


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "middle", "version", "program", "other run"])
def test_a_file_that_cannot_be_continued_is_written_anew(tmp_path: Path, damage: str) -> None:
    _, events = run_of()
    path = tmp_path / "history.sqlite"
    finished(tmp_path, events[:50])
    content = path.read_bytes()
    match damage:
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_bytes(b"no database" * 1000)
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "middle":
            path.write_bytes(content[:4096] + bytes(len(content) - 4096))
        case "version" | "program":
            with closing(sqlite3.connect(path)) as db:
                db.execute(f"PRAGMA {'user_version' if damage == 'version' else 'application_id'} = 77")
        case _:
            path.unlink()
            finished(tmp_path, events[:50], spec_of(2, 2, 1, rounds=39))
    history = finished(tmp_path, events)
    if history.problem:  # SQLite finds some damage when it writes: then the next start begins anew
        assert damage in ("cut", "middle")
        history = finished(tmp_path, events)
    assert not history.problem
    assert dump(path) == expected(tmp_path)


def test_a_file_that_is_ahead_of_its_log_is_written_anew(tmp_path: Path) -> None:
    """The log was restored from a copy."""
    _, events = run_of()
    finished(tmp_path, [*events, *(replace(event, at=5000.0) for event in events[-1:])])
    finished(tmp_path, events)
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path)
    other = [*events[:-1], replace(events[-1], at=6000.0)]
    finished(tmp_path, other)
    assert SqliteHistory(tmp_path / "history.sqlite").run().at == 6000.0


KILLED = """
import sys
from pathlib import Path
from coordinator.run.state.apply import apply
from coordinator.store.event_codec import decode
from coordinator.run.state.state import State
from coordinator.store import history_writer
from coordinator.store.history_writer import HistoryWriter
from protocol.spec.run import RunSpec

folder = Path(sys.argv[1])
spec = RunSpec.from_json((folder / "spec.json").read_text())
events = [decode(*line.split("\\t")) for line in (folder / "events.tsv").read_text().splitlines()]
path, metrics = folder / "history.sqlite", folder / "metrics.jsonl"
history_writer.GATHER_SECONDS = 0.001
history = HistoryWriter(path, spec, spec.name, lambda number: None, metrics, 0)
history.start()
state = State(spec, spec.name)
for event in events:
    before, state = state, apply(state, event)
    history.record(event, before, state)
    print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("after", [10, 60])
def test_a_killed_writer_leaves_a_history_that_goes_on(tmp_path: Path, after: int) -> None:
    spec, events = run_of()
    writer(tmp_path, events)
    (tmp_path / "spec.json").write_text(spec.canonical_json)
    (tmp_path / "events.tsv").write_text("".join("\t".join(encode(event)) + "\n" for event in events))
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(after):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    history = finished(tmp_path, events)
    assert not history.problem
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path)


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `nbytes`: as a full disk, the system refuses to write."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_a_full_disk_costs_nothing_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(history_writer, "RETRY_SECONDS", 0.01)
    waits = threading.Event()
    monkeypatch.setattr(history_writer.log, "warning", lambda *_: waits.set())
    _, events = run_of()
    finished(tmp_path, events[:20])
    history = writer(tmp_path, events[:20])
    with small_files(8192):
        record(started(history, events[:20]), events, 20)
        assert waits.wait(30)
        assert "waits" in history.problem
    history.close(None)
    assert not history.problem
    assert "is written again" in caplog.text
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path)


def test_a_disk_that_stays_full_is_said_once_and_made_good_by_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, events = run_of()
    finished(tmp_path, events[:20])
    with small_files(8192):
        history = finished(tmp_path, events)
    assert "at its next start" in history.problem
    assert caplog.text.count("The history of the run cannot be written") == 1
    assert not finished(tmp_path, events).problem
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path)


def test_a_writer_that_falls_behind_stops_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history_writer, "MOST_WAITING", 10)
    _, events = run_of()
    history = writer(tmp_path, ())
    record(history, events, 0)  # nothing is written yet
    history.start()
    history.close(None)
    assert "too slow" in history.problem
    assert caplog.text.count("too slow") == 1
    assert not finished(tmp_path, events).problem
    assert dump(tmp_path / "history.sqlite") == expected(tmp_path)


def test_a_bug_ends_the_history_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(history_writer, "changes_of", fail)
    history = finished(tmp_path, run_of()[1])
    assert "internal error" in history.problem
    assert "a bug" in caplog.text


def test_a_folder_in_the_place_of_the_file_is_a_problem_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").mkdir()
    assert "cannot be written" in finished(tmp_path, run_of()[1]).problem
