"""The status document, which programs and the dashboard read, and the sentences in it."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from coordinator.status.cause_text import cause_text, run_text, status_text
from coordinator.status.document import SCHEMA, document
from coordinator.status.facts import FACTS
from protocol.status import Cause, CauseCode, Measurement, PeerStatus, RunStatus, Wait
from protocol.types import Dialer, Link, Member, Pause, PausedBy, Plan, Replica, Role, StageRange
from tests.builders import keyed, status_of

MEASUREMENT = Measurement(keyed(0).peer, 7, 0, 0, 3.5, 3.25, 640, 12.5, 0.5, complete=True)
STATUS = status_of(measurements=[MEASUREMENT])
A, B = keyed(0).peer, keyed(1).peer
GOLDEN = Path(__file__).with_name("sentences.txt")
GONE = Cause(CauseCode.MEMBER_GONE, peers=(A,), stages=(1,))
OBSTRUCTED = Cause(CauseCode.OBSTRUCTED, replicas=(1,), causes=(GONE, Cause(CauseCode.VACANT, stages=(0, 1))))
CAUSES = (
    Cause(
        CauseCode.PEERS_LACKING, causes=(Cause(CauseCode.PEERS_LACKING, role=Role.STAGE, count=1, total=2),)
    ),
    Cause(CauseCode.SPEED_UNKNOWN, peers=(A, B)),
    Cause(CauseCode.ENDPOINT_LACKING, peers=(A, B)),
    Cause(CauseCode.HOST_LACKING, peers=(A, B)),
    Cause(CauseCode.MEMORY_LACKING, count=9, total=8, detail="9 MB are needed"),
    Cause(CauseCode.STARTING),
    Cause(CauseCode.TRAINING),
    Cause(CauseCode.OFFERS_LACKING, replicas=(1, 2), stages=(0,)),
    Cause(CauseCode.PAYLOADS_CONTESTED, count=1, stages=(0,)),
    Cause(CauseCode.REPORTS_LACKING, replicas=(1,), stages=(0,)),
    Cause(CauseCode.DIGESTS_LACKING, stages=(0, 1)),
    Cause(CauseCode.NO_EXCHANGE, peers=(A, B)),
    Cause(CauseCode.NO_REPLICA, causes=(OBSTRUCTED,)),
    Cause(CauseCode.PAUSED),
    Cause(CauseCode.DISK_FULL, detail="The event log run.sqlite cannot be written: it is full."),
    Cause(CauseCode.FINISHED),
)
OF_PEERS = (
    OBSTRUCTED,
    replace(OBSTRUCTED, causes=(GONE,), count=14, total=20),
    Cause(CauseCode.VACANT, stages=(0, 1)),
    GONE,
    Cause(CauseCode.MEMBER_DRAINS, peers=(A,), stages=(1,)),
    Cause(CauseCode.MEMBER_RESTS, peers=(A,), stages=(1,), round_number=7, count=3),
    Cause(CauseCode.MEMBER_SYNCS, peers=(A,), stages=(0, 1)),
    Cause(CauseCode.LINK_CLOSED, peers=(A, B), address="44.10.0.9:7710", detail="nothing answers there"),
    Cause(CauseCode.REPLICA_RESTS, round_number=7),
    Cause(CauseCode.FRAME_REFUSED, peers=(A, B), replicas=(1,), detail="values that are not finite"),
    Cause(CauseCode.NO_PAYLOAD, replicas=(1,), round_number=7),
    Cause(CauseCode.NO_PAYLOAD, replicas=(1,), round_number=7, peers=(A, B)),
    Cause(CauseCode.SPARE),
    Cause(CauseCode.FOLLOWS, stages=(0,), causes=(OBSTRUCTED,)),
    Cause(CauseCode.SPARES_KEPT, count=1),
    Cause(CauseCode.NEXT_PLAN),
    Cause(CauseCode.COORDINATOR_BEHIND, round_number=9),
    Cause(CauseCode.DISCOUNTED),
    Cause(CauseCode.ALARM, round_number=9, count=8, detail="Round 9: the loss rose."),
)


def test_the_sentences_are_those_of_the_golden_file() -> None:
    """After a change on purpose, write the found sentences to the file."""
    of_run = [replace(each, round_number=3, total=12) for each in CAUSES]
    assert {each.code for each in (*of_run, *OF_PEERS)} == set(CauseCode)
    pause = Pause(4, PausedBy.OPERATOR, "a look")
    found = [
        *(f"{each.code}: {run_text(each, None, 5, 1)}" for each in of_run),
        *(f"{each.code}, paused: {run_text(each, pause, 5, 1)}" for each in of_run),
        *(f"{each.code}: {cause_text(each)}" for each in OF_PEERS),
    ]
    assert found == GOLDEN.read_text().splitlines()


def test_programs_find_every_field_and_the_sentences() -> None:
    peers = tuple(
        replace(each, waits=(Wait.GROUP, Wait.PAYLOADS), cause=OF_PEERS[-2]) for each in STATUS.peers
    )
    data = document(replace(STATUS, peers=peers))
    assert data["schema"] == SCHEMA == 2
    assert data.keys() >= {field.name for field in fields(RunStatus)}
    (peer,) = data["peers"]
    assert peer.keys() >= {field.name for field in fields(PeerStatus)}
    assert peer["waits"] == ["group", "payloads"]
    assert (peer["activity"], peer["message"]) == ("trains", peer["cause"]["text"])
    assert data["spec"]["hash"] == STATUS.spec.hash
    assert data["spec"]["inner"]["steps"] == STATUS.spec.inner.steps
    assert (data["message"], data["cause"]["code"]) == (status_text(STATUS), "training")
    assert data["replicas"][0]["figures"]["validation_loss"] == 3.25
    assert data["facts"].keys() == FACTS.keys()


def test_fields_may_be_left_out() -> None:
    found = document(STATUS, without=("peers", "measurements"))
    assert found.keys() == document(STATUS).keys() - {"peers", "measurements"}
    assert found["activities"] == {"trains": 1}


def test_the_plan_has_chains_and_no_addresses() -> None:
    members = (Member(A, StageRange(0, 1), "10.0.0.7:1"), Member(B, StageRange(1, 3), ""))
    plan = Plan(3, 7, 640, (Replica(1, members, (Link(8, Dialer.UPSTREAM),)),), "a reason")
    data = document(replace(status_of(), plan=plan))
    assert data["plan"]["replicas"] == [
        {
            "index": 1,
            "members": [
                {"peer": A, "stages": [0], "relayed": False},
                {"peer": B, "stages": [1, 2], "relayed": False},
            ],
            "links": [{"k": 8, "dialer": "upstream"}],
            "weight": 1.0,
            "microbatches": 0,
            "resumes_at": 0,
            "resumed_in": 0,
        }
    ]
    assert "10.0.0.7" not in json.dumps(data)
    assert document(status_of())["plan"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_json_does_not_have_are_null(value: float) -> None:
    data = document(status_of(measurements=[replace(MEASUREMENT, validation_loss=value, train_loss=value)]))
    measurement = data["measurements"][0]
    assert (measurement["validation_loss"], measurement["train_loss"]) == (None, None)
    assert data["replicas"][0]["figures"]["validation_loss"] is None
    assert data["validation_loss"] is None
    assert json.loads(json.dumps(data, allow_nan=False)) == data
