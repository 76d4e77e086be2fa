"""What the pages get of a run, from its state."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coordinator.dashboard.feed import Feed
from coordinator.dashboard.prediction import Predictions
from coordinator.dashboard.run_record import run_record, state_of_peer
from coordinator.dashboard.swarm_record import network_record, peer_record, swarm_record
from coordinator.dashboard.view import RunView
from coordinator.placement.cost_model import message_bytes
from coordinator.state import events
from coordinator.state.commands import Leave, Start
from coordinator.status.run_status import run_status
from protocol.status import Measurement
from protocol.types import Capacity, Lifecycle, PeerId
from tests.builders import keyed, spec_of, status_of
from tests.support.coordinator_run import Run, offer, play_round, started

A, B, C = (keyed(i) for i in range(3))
HOSTILE = "<script>alert(1)</script>\x1b[31m" + "x" * 100_000


def view_of(run: Run, *measurements: Measurement) -> RunView:
    return RunView(run.state, run_status(run.state, measurements, run.now, run.now))


def measured(number: int = 1, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "peer": A.peer,
        "round_number": number,
        "replica": 0,
        "position": 0,
        "validation_loss": 5.0,
        "train_loss": 5.5,
        "tokens": 1000,
        "inner_seconds": 3.0,
        "outer_seconds": 1.0,
        "compute_seconds": 1.5,
        "complete": True,
    }
    return Measurement(**(fields | changes))


def test_the_run_as_a_whole() -> None:
    run = started(2, rounds=5)
    play_round(run)
    record = run_record(view_of(run, measured(), measured(peer=B.peer, replica=1, validation_loss=4.0)))
    assert (record["round"], record["rounds"], record["decided"]) == (2, 5, 1)
    assert (record["committed"], record["aborted"], record["tokens"]) == (2, 0, run.state.tokens)
    assert record["loss"] == 4.5
    assert record["tokens_per_second"] == 500
    assert record["remaining_seconds"] is not None
    assert record["peers"] == {"trains": 2}
    assert [each["state"] for each in record["replicas"]] == ["trains", "trains"]
    assert record["replicas"][0]["train_loss"] == 5.5
    assert not record["stalled"]


def test_a_replica_says_what_it_does_in_the_open_round() -> None:
    run = started(2)
    for stage in range(2):
        offer(run, A, A.payload(run.spec, stage, 1))
    states = {each["index"]: each for each in run_record(view_of(run))["replicas"]}
    assert (states[0]["state"], states[0]["progress"]) == ("offered", 1.0)
    assert (states[1]["state"], states[1]["progress"]) == ("trains", 0.0)
    for stage in range(2):
        offer(run, B, B.payload(run.spec, stage, 1))
    assert {each["state"] for each in run_record(view_of(run))["replicas"]} == {"exchanges"}


def test_a_lost_member_is_said() -> None:
    run = started(1, pipelines=1)
    run.accept(Leave(B.peer, HOSTILE[:150]))
    record = run_record(view_of(run))
    broken = next(each for each in record["replicas"] if each["members"] == 2)
    assert broken["state"] == "broken"
    assert B.peer[-8:] in broken["doing"]
    assert record["peers"]["gone"] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_that_are_not_finite_are_null(value: float) -> None:
    run = started(2)
    view = view_of(run, measured(validation_loss=value, train_loss=value, compute_seconds=value))
    assert run_record(view)["loss"] is None
    assert run_record(view)["replicas"][0]["train_loss"] is None
    predictions = Predictions().of(view)
    for record in (run_record(view), swarm_record(view, predictions), network_record(view, predictions)):
        json.dumps(record, allow_nan=False)


def test_before_the_first_plan_there_is_no_replica() -> None:
    run = Run(spec_of())
    run.accept(Start())
    run.accept(A.join(run.spec))
    view = view_of(run)
    record = run_record(view)
    assert (record["phase"], record["replicas"], record["round"]) == ("gathering", [], 0)
    assert record["message"].startswith("waiting for 1 ")
    assert swarm_record(view, Predictions().of(view))["replicas"] == []
    assert network_record(view, Predictions().of(view))["replicas"] == []


def test_a_chain_with_its_link() -> None:
    run = started(1, pipelines=1)
    view = view_of(run, measured(peer=B.peer, replica=1, complete=False))
    record = swarm_record(view, Predictions().of(view))
    chain = next(each for each in record["replicas"] if len(each["members"]) == 2)
    assert [each["peer"] for each in chain["members"]] == [B.peer, C.peer]
    assert chain["links"][0]["k"] == run.spec.link.k
    assert chain["links"][0]["down"] is None, "nobody has measured it"
    member = next(each for each in record["peers"] if each["peer"] == B.peer)
    assert member["busy"] == 0.5
    assert member["state"] == "trains"


def test_a_replica_in_no_plan_is_shown_with_what_it_lacks() -> None:
    run = started(2, pipelines=1)
    run.accept(Leave(keyed(3).peer, "a test"))
    play_round(run)
    view = view_of(run)
    assert len(view.replicas) == 2
    (waiting,) = swarm_record(view, Predictions().of(view))["waiting"]
    assert [each["stages"] for each in waiting["members"]] == ["0", "1"]
    assert waiting["members"][0]["peer"] == C.peer
    assert not waiting["is_ready"]
    assert run_record(view)["waiting"] == [waiting["doing"]]


def test_bytes_against_the_prediction() -> None:
    run = started(1, pipelines=1)
    down, up = message_bytes(run.spec, run.spec.link.k)
    messages = run.spec.inner.steps * run.spec.inner.microbatches
    view = view_of(run, measured(peer=B.peer, replica=1, complete=False, link_bytes_sent=123))
    record = network_record(view, Predictions().of(view))
    first, last = next(each for each in record["replicas"] if each["links"])["members"]
    assert (first["link_bytes"], first["link_predicted"]) == (123, messages * down)
    assert (last["link_bytes"], last["link_predicted"]) == (None, messages * up)


def test_predictions_are_made_anew_for_new_measurements_only() -> None:
    run = started(1, pipelines=1)
    predictions = Predictions()
    first = predictions.of(view_of(run))
    assert predictions.of(view_of(run)) is first
    play_round(run)
    assert predictions.of(view_of(run)) is first
    measured_by_b = replace(run.state.estimates[B.peer], microbatch_seconds=1.0)
    run.state = replace(run.state, estimates={**run.state.estimates, B.peer: measured_by_b})
    assert predictions.of(view_of(run)) is not first


def test_what_a_peer_says_is_cut_and_printable() -> None:
    run = started(2)
    estimates = replace(run.state.estimates[A.peer], capacity=Capacity(HOSTILE, 2**30, 1))
    run.state = replace(
        run.state,
        estimates={**run.state.estimates, A.peer: estimates},
        peers={**run.state.peers, A.peer: replace(run.state.peers[A.peer], problem=HOSTILE)},
    )
    view = view_of(run)
    record = peer_record(view, view.peers[A.peer])
    for field in ("device", "problem"):
        assert len(record[field]) <= 400
        assert record[field].isprintable()
        assert record[field].startswith("<script>"), "the page escapes it"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "trains"),
        ({"lifecycle": Lifecycle.SYNCING}, "follows"),
        ({"lifecycle": Lifecycle.READY, "assignment": ""}, "spare"),
        ({"lifecycle": Lifecycle.DRAINING}, "drains"),
        ({"lifecycle": Lifecycle.GONE}, "gone"),
        ({"lifecycle": Lifecycle.GONE, "rests": True}, "rests"),
    ],
)
def test_the_word_for_what_a_peer_does(changes: dict[str, Any], state: str) -> None:
    assert state_of_peer(replace(status_of().peers[0], **changes)) == state


def test_the_feed_keeps_the_newest_events_that_matter() -> None:
    feed = Feed()
    feed.note(events.PeerLeft(1.0, A.peer, HOSTILE, False))
    feed.note(events.PeerLost(2.0, PeerId("p"), 9.0))
    feed.note(events.GroupClosed(3.0, 0, 1, "group", "digest", 1.0))
    newest, oldest = feed.lines()
    assert newest == {"at": 2.0, "text": "p is lost: silent for 9.0 s", "warning": True}
    assert len(oldest["text"]) <= 400
    assert oldest["text"].isprintable()
    for i in range(1000):
        feed.note(events.PeerLost(float(i), PeerId("p"), 9.0))
    assert len(feed.lines()) < 100
