"""What the pages get beside the status document: the feed, predictions, and text fit for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.api.dashboard import Entrance
from coordinator.api.run_records import RunRecords
from coordinator.ops.dashboard.source import MOST_REPLICAS, Feed, LiveRecords, Predictions
from coordinator.placement.cost_model import message_bytes
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state import events
from protocol.status import Measurement
from protocol.types import Capacity, PeerId
from tests.builders import keyed
from tests.support.coordinator_run import Run, play_round, started

A, B, C = (keyed(i) for i in range(3))
HOSTILE = "<script>alert(1)</script>\x1b[31m" + "x" * 100_000


def source_of(run: Run, *measurements: Measurement) -> LiveRecords:
    loop: Any = SimpleNamespace(state=run.state, now=lambda: run.now, hindrance=None)
    newest = {each.peer: each for each in measurements}
    records: Any = SimpleNamespace(
        metrics=SimpleNamespace(newest=newest), resting={}, health=SimpleNamespace(latest=None)
    )
    entrance = Entrance("", "", "")
    return LiveRecords(cast(CommandLoop, loop), cast(RunRecords, records), Feed(), entrance, Path("nowhere"))


def test_the_event_of_a_finished_run_has_all_replicas_that_have_measured() -> None:
    run = started(2, rounds=1)
    measured = Measurement(C.peer, 1, 7, 0, 3.0, 4.0, complete=True, tokens=64)
    assert [each["index"] for each in source_of(run, measured).event()["replicas"]] == [0, 1]
    run.now += 20
    play_round(run)
    assert [each["index"] for each in source_of(run, measured).event()["replicas"]] == [0, 1, 7]


def test_the_event_leaves_out_what_grows_with_the_swarm() -> None:
    run = started(2)
    source = source_of(run)
    event, whole = source.event(), source.whole()
    assert whole.keys() - event.keys() == {"peers", "measurements", "plan", "time", "evaluations"}
    assert event["activities"] == {"trains": 2}
    assert len(event["replicas"]) == 2 <= MOST_REPLICAS
    assert {each["peer"] for each in whole["peers"]} == {A.peer, B.peer}
    assert source.peer(A.peer)["peer"]["activity"] == "trains"
    assert source.peer("nobody")["peer"] is None


def test_a_chain_with_its_prediction() -> None:
    run = started(1, pipelines=1)
    down, up = message_bytes(run.spec, run.spec.link.k)
    messages = run.spec.inner.steps * run.spec.inner.microbatches
    source = source_of(run)
    chain = next(each for each in source.whole()["replicas"] if len(each["places"]) == 2)
    assert [each["peer"] for each in chain["places"]] == [B.peer, C.peer]
    assert [each["k"] for each in chain["links"]] == [run.spec.link.k]
    (link,) = source.predictions()[str(chain["index"])]["links"]
    assert link["bytes"] == [messages * down, messages * up]
    assert link["bandwidth"] == [None, None], "nobody has measured it"


def test_predictions_are_made_anew_for_new_measurements_only() -> None:
    run = started(1, pipelines=1)
    predictions = Predictions()
    first = predictions.of(run.state)
    assert predictions.of(run.state) is first
    play_round(run)
    assert predictions.of(run.state) is first
    measured_by_b = replace(run.state.estimates[B.peer], microbatch_seconds=1.0)
    run.state = replace(run.state, estimates={**run.state.estimates, B.peer: measured_by_b})
    assert predictions.of(run.state) is not first


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_peer_says_is_cut_and_printable_and_figures_are_finite(value: float) -> None:
    run = started(2)
    estimates = replace(run.state.estimates[A.peer], capacity=Capacity(HOSTILE, 2**30, 1))
    run.state = replace(
        run.state,
        estimates={**run.state.estimates, A.peer: estimates},
        peers={**run.state.peers, A.peer: replace(run.state.peers[A.peer], problem=HOSTILE)},
    )
    source = source_of(run, Measurement(A.peer, 1, 0, 0, value, value, compute_seconds=value, complete=True))
    found = source.peer(A.peer)["peer"]
    for text in (found["problem"], found["estimates"]["capacity"]["device"]):
        assert len(text) <= 1000
        assert text.isprintable()
        assert text.startswith("<script>"), "the page escapes it"
    for record in (source.event(), source.whole(), source.peer(A.peer), source.predictions()):
        json.dumps(record, allow_nan=False)


def test_the_feed_keeps_the_newest_events_that_matter() -> None:
    feed = Feed()
    feed.note(events.PeerLeft(1.0, A.peer, HOSTILE, False))
    feed.note(events.PeerLost(2.0, PeerId("p"), 9.0))
    feed.note(events.GroupClosed(3.0, 0, 1, "group", "digest", 1.0))
    newest, oldest = feed.lines()
    assert newest == {"at": 2.0, "text": "..p is lost: silent for 9.0 s", "peers": ["p"], "warning": True}
    assert len(oldest["text"]) <= 400
    assert oldest["text"].isprintable()
    for i in range(1000):
        feed.note(events.PeerLost(float(i), PeerId("p"), 9.0))
    assert len(feed.lines()) < 100
