"""Answers: the statements that the runs of scenarios.py call for, by their fields; and all sentences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.ops.explain.explain import MOST_STATEMENTS
from coordinator.ops.explain.offline import last_explanation
from coordinator.ops.explain.statements import Code
from coordinator.run.state import events
from coordinator.run.state.commands import Leave
from coordinator.run.state.events import Event, PlanAdopted
from coordinator.run.state.state import KEPT_DECISIONS
from coordinator.store.metrics import MetricsFile
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import CauseCode, Measurement
from protocol.types import Reachability, Role
from tests.builders import keyed
from tests.coordinator.ops.explain.scenarios import GOLDEN, answer, sentences
from tests.support.certificates import authority
from tests.support.coordinator_run import play_round, started
from tests.support.explaining import Asked, check_bounded, said
from tests.support.timed_rounds import A, B, C, D, timed_round, usual_rounds

EXPECTED: list[tuple[str, Code, dict[str, Any], tuple[type[Event], ...]]] = [
    # a round
    ("slow_replica", Code.ROUND, {"rounds": (5,), "seconds": 20.0, "usual": 11.5, "compared": 4}, ()),
    ("slow_replica", Code.MORE_TIME, {"detail": "offer", "extra": 8.5, "seconds": 9.0, "usual": 0.5}, ()),
    (
        "slow_replica",
        Code.LAST,
        {"replicas": (1, 2), "seconds": 19.0, "lag": 8.8, "usual": 10.5},
        (events.PayloadOffered,),
    ),
    ("slow_replica", Code.COMPUTED, {"peers": (B.peer,), "inner": 18.0, "compute": 3.0}, ()),
    ("slow_replica", Code.REMEDY, {"detail": "offer"}, ()),
    ("slow_machine", Code.ALWAYS_SLOW, {"replicas": (1,), "seconds": 10.1}, ()),
    ("slow_machine", Code.FLOPS, {"peers": (B.peer,), "own": 1e9, "usual": 4e9}, ()),
    ("lost_member", Code.NO_OFFER, {"replicas": (1,), "peers": (B.peer,)}, (events.PeerLost,)),
    ("lost_member", Code.REMEDY, {"detail": "lost", "seconds": 15.0}, (events.PeerLost,)),
    ("moved_member", Code.EVENT, {"peers": (B.peer,), "after": 0.0}, (events.AddressesChanged,)),
    (
        "rejected_payload",
        Code.NOT_COUNTED,
        {"replicas": (1,), "peers": (B.peer,), "stages": (0, 1)},
        (events.PayloadOffered, events.PayloadRejected),
    ),
    ("rejected_payload", Code.REMEDY, {"detail": "rejected"}, (events.PayloadRejected, events.PeerStruck)),
    ("aborted_round", Code.ABORTED, {"stages": (0,)}, (events.RoundDecided,)),
    ("aborted_round", Code.NO_OFFER, {"replicas": (1,), "usual": 10.5, "detail": ""}, ()),
    (
        "restarted_coordinator",
        Code.RESTARTED,
        {"seconds": 90.0},
        (events.DigestAttested, events.CoordinatorStarted),
    ),
    ("slow_gathering", Code.MORE_TIME, {"detail": "group", "extra": 7.5}, ()),
    ("slow_gathering", Code.LAST_REPORT, {"stages": (0,), "peers": (B.peer,), "lag": 8.0}, ()),
    ("missing_report", Code.NO_REPORT, {"stages": (1,), "peers": (C.peer,), "seconds": 25.0}, ()),
    ("withheld_payload", Code.WITHHELD, {"peers": (B.peer, C.peer), "known": 1}, (events.PayloadWithheld,)),
    ("withheld_now", Code.WITHHELD, {"peers": (B.peer, C.peer), "known": 0}, (events.PayloadWithheld,)),
    (
        "nonfinite_member",
        Code.NONFINITE,
        {"rounds": (3,), "replicas": (1,), "peers": (C.peer,), "step": 7, "done": 6},
        (events.PayloadWithheld,),
    ),
    ("nonfinite_round", Code.NONFINITE, {"replicas": (1,), "peers": (C.peer,)}, (events.PayloadWithheld,)),
    ("nonfinite_peer", Code.NONFINITE, {"rounds": (3,), "peers": (C.peer,), "step": 7, "done": 6}, ()),
    ("new_plan", Code.EVENT, {"peers": ()}, (events.PlanAdopted,)),
    ("new_plan", Code.NO_OFFER, {"replicas": (2,), "peers": (C.peer, D.peer)}, (events.PeerLeft,)),
    (
        "broken_replica",
        Code.BROKEN,
        {"replicas": (2,), "peers": (C.peer,), "stages": (1,), "done": 1, "steps": 2},
        (events.PeerRetreated, events.PeerLeft),
    ),
    ("open_round", Code.ROUND, {"rounds": (5,), "decided": 0.0, "seconds": 30.0}, ()),
    ("first_round", Code.ROUND, {"seconds": 11.5, "usual": None, "compared": 0}, ()),
    ("skipped_stage", Code.COMMITTED, {"stages": (0,), "all": 0.0}, (events.RoundDecided,)),
    ("skipped_stage", Code.SKIPPED, {"stages": (1,)}, (events.RoundDecided,)),
    ("alarm_in_a_round", Code.EVENT, {}, (events.AlarmRaised,)),
    ("rollback", Code.ROLLBACK, {"rounds": (5, 2)}, ()),
    ("rollback", Code.EVENT, {}, (events.RunRolledBack,)),
    ("after_a_pause", Code.STOOD_STILL, {"seconds": 600.0}, (events.RunPaused, events.RunResumed)),
    # now
    ("waiting_now", Code.OFFERED, {"ago": 3.0}, (events.PayloadOffered,)),
    ("late_now", Code.LATE, {"replicas": (1,), "seconds": 18.0, "usual": 10.5}, ()),
    ("gathering_payloads_now", Code.GROUP_CLOSED, {"stages": (1,), "ago": 2.0}, (events.GroupClosed,)),
    ("paused_now", Code.EVENT, {"ago": 611.5}, (events.RunPaused,)),
    ("alarm_now", Code.CAUSE, {}, (events.AlarmRaised,)),
    ("stalled_now", Code.EVENT, {"peers": (A.peer,), "ago": 6.0}, (events.PeerLeft,)),
    ("before_the_run_now", Code.EVENT, {"peers": (A.peer,), "ago": 30.0}, (events.PeerJoined,)),
    ("after_an_abort", Code.ABORTS, {"rounds": (5,), "compared": 5}, (events.RoundDecided,)),
    ("slow_machine_now", Code.PREDICTION, {"replicas": (1,), "detail": "computing"}, ()),
    ("slow_machine_now", Code.FASTER, {"detail": "computing", "rate": 1e6}, ()),
    ("slow_line_now", Code.FASTER, {"peers": (B.peer, C.peer), "detail": "sending", "rate": 1e4}, ()),
    ("slow_line_now", Code.IDLE, {"peers": (D.peer,), "spares": 0}, ()),
    # a peer
    ("training_peer", Code.PEER, {"detail": "trains", "role": Role.REPLICA, "replicas": (1,)}, ()),
    ("training_peer", Code.COUNTED, {"rounds": (4,)}, (events.RoundDecided,)),
    ("training_peer", Code.ASSIGNED, {"epoch": 1, "replicas": (1,)}, (events.PlanAdopted,)),
    ("uncompressed_peer", Code.ASSIGNED, {"upstream": None, "downstream": 0.0}, ()),
    ("banned_peer", Code.PEER, {"detail": "banned"}, ()),
    ("banned_peer", Code.EVENT, {}, (events.PeerBanned,)),
    ("quarantined_peer", Code.PEER, {"detail": "quarantined"}, ()),
    ("quarantined_peer", Code.EVENT, {}, (events.PeerStruck,)),
    ("lost_peer", Code.PEER, {"detail": "gone"}, ()),
    ("lost_peer", Code.EVENT, {"ago": 15.0}, (events.PeerLost,)),
    ("left_peer", Code.EVENT, {"ago": 20.0}, (events.PeerLeft,)),
    ("draining_peer", Code.EVENT, {}, (events.PeerDraining,)),
    ("leaving_spare", Code.PEER, {"detail": "drains"}, ()),
    ("spare_without_memory", Code.PEER, {"detail": "spare"}, ()),
    ("spare_without_memory", Code.NO_VACANCY, {}, (events.PeerJoined,)),
    ("spare_without_neighbours", Code.BEHIND, {"stages": (0,), "rounds": (-1,), "least": 0}, ()),
    ("follower", Code.BEHIND, {"stages": (1,), "rounds": (-1,), "least": 3}, ()),
    ("retreated_peer", Code.EVENT, {"peers": (C.peer,)}, (events.PeerRetreated,)),
    ("slow_peer", Code.FLOPS, {"own": 1e9, "usual": 4e9}, (events.PeerMeasured,)),
    ("slow_peer", Code.UPLINK, {"own": 1e6, "usual": 4e6}, (events.PeerMeasured,)),
    ("slow_peer", Code.PACE, {"replicas": (1,), "own": 19.0, "usual": 10.1}, ()),
    ("before_the_run_peer", Code.PEER, {"detail": "waits"}, ()),
]


@pytest.mark.parametrize(("name", "code", "fields", "cited"), EXPECTED)
def test_what_is_said_with_its_figures_and_events(
    name: str, code: Code, fields: dict[str, Any], cited: tuple[type[Event], ...]
) -> None:
    ask, found = answer(name)
    kinds = [{*map(type, ask.cited(each))} for each in said(found, code, **fields)]
    assert kinds, [each.code for each in found.statements]
    assert not cited or {*cited} in kinds


def test_a_peer_that_its_owner_has_paused_is_not_told_to_join() -> None:
    ask = answer("left_peer")[0]
    rests = Asked(ask.state, [event for _, event in ask.read(1, len(ask.log))], ask.now, {C.peer})(C.peer)
    assert rests.title.text.endswith("rests: its machine lets it take no part for now")
    assert "'hetnode resume'" in said(rests, Code.REMEDY, detail="rests")[0].text
    assert "hetnode join" not in " ".join(each.text for each in rests.statements)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("stalled_now", CauseCode.NO_REPLICA),
        ("before_the_run_now", CauseCode.PEERS_LACKING),
        ("finished_now", CauseCode.FINISHED),
        ("paused_now", CauseCode.PAUSED),
        ("waiting_now", CauseCode.OFFERS_LACKING),
    ],
)
def test_the_title_has_the_cause_of_the_run(name: str, code: CauseCode) -> None:
    title = answer(name)[1].title
    if name == "paused_now":
        assert "PAUSED" in title.detail
    assert title.cause
    assert title.cause.code is code


def test_what_is_not_said() -> None:
    assert not said(answer("skipped_stage")[1], Code.ABORTED)
    assert not said(answer("rollback")[1], Code.NO_OFFER)
    assert not said(answer("slow_replica")[1], Code.FIRST_ROUND)
    assert not said(answer("draining_peer")[1], Code.BEHIND)
    assert not said(answer("nonfinite_member")[1], Code.WITHHELD)
    assert not said(answer("nonfinite_round")[1], Code.NO_OFFER, replicas=(1,))


def test_the_sentences_are_those_of_the_golden_file() -> None:
    found = sentences()
    assert found == json.loads(GOLDEN.read_text()), "python -m tests.coordinator.ops.explain.scenarios"
    assert all(text and text.isprintable() for texts in found.values() for text in texts)


def test_events_have_their_times() -> None:
    found = answer("events_of_the_log")[1]
    assert [(each.code, each.events, each.figures["at"]) for each in found.statements] == [
        (Code.EVENT, (1,), 1000.0),
        (Code.EVENT, (2,), 1000.0),
    ]


@pytest.mark.parametrize(
    "question",
    [
        *("0", "7", "99999999999", "event 0", "event 1000000", f"event {' 1' * 65}x", "Qm", "..", "nobody"),
        *("é" * 10_000, "event", "-1"),
    ],
)
def test_what_is_not_there_is_one_message(question: str) -> None:
    run = started(3, rounds=20)
    with pytest.raises(HetnodeError) as refusal:
        Asked(run.state, run.events, run.now)(question)
    assert refusal.value.code is ErrorCode.BAD_OPTION
    assert len(refusal.value.cause) < 300


def test_an_old_round_whose_plan_is_not_kept_is_explained_as_right_after_it() -> None:
    run = started(3, rounds=90)
    usual_rounds(run, 4)
    timed_round(run, {A: 10.0, B: 19.0, C: 10.2})
    early = Asked(run.state, run.events, run.now)(5)
    while run.state.current_round < 5 + 2 * KEPT_DECISIONS:
        newest = run.state.plans[-1]
        run.apply(
            PlanAdopted(run.now, replace(newest, epoch=newest.epoch + 1, from_round=run.state.current_round))
        )
        usual_rounds(run, 1)
    assert run.state.plan_of(1) is None
    assert Asked(run.state, run.events, run.now)(5) == early


def test_a_folder_answers_without_its_coordinator(tmp_path: Path) -> None:
    run = started(replicas=2, stages=2, rounds=5)
    for _ in range(2):
        run.now += 20
        play_round(run)
    (tmp_path / "authority.pem").write_bytes(authority().pem)
    store = SqliteStore(tmp_path / "coordinator.sqlite", keyed(9).peer, keyed(9).sign)
    store.begin(run.spec.canonical_json)
    store.append(run.events)
    store.close()
    assert last_explanation(tmp_path, "2").title.rounds == (2,)
    assert last_explanation(tmp_path, A.peer[-8:]).title.peers == (A.peer,)
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.record_measurement(run.now, Measurement(B.peer, 2, 1, 0, steps=6, nonfinite_step=7))
    assert said(last_explanation(tmp_path, "2"), Code.NONFINITE, peers=(B.peer,), step=7)
    with pytest.raises(HetnodeError) as refusal:
        last_explanation(tmp_path, "99")
    assert refusal.value.code is ErrorCode.BAD_OPTION


def test_a_long_run_and_a_very_long_round_have_bounded_answers() -> None:
    run = started(3, rounds=60)
    usual_rounds(run, 10)
    for _ in range(1100):
        run.events.append(events.AddressesChanged(run.now, A.peer, "h:1", Reachability.OPEN, "h:1", ""))
    usual_rounds(run, 1)
    ask = Asked(run.state, run.events, run.now)
    for question in (11, "now", A.peer):
        found = ask(question)
        check_bounded(ask, found)
        assert len(found.statements) <= MOST_STATEMENTS + 1
    assert not ask.read_numbers, "only a question about events reads the log"


@pytest.mark.parametrize(
    "hostile", ["\x1b[2J\x1b[31mred", "<script>alert(1)</script>", "[bold]x[/]", "x" * 100_000]
)
def test_what_a_peer_says_is_text_and_cut(hostile: str) -> None:
    run = started(3, rounds=20)
    run.accept(Leave(B.peer, hostile))
    ask = Asked(run.state, run.events, run.now)
    check_bounded(ask, ask(B.peer))
