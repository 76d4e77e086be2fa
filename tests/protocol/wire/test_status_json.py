"""The status as plain data, which programs read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from protocol.status import Measurement, Wait
from protocol.types import Dialer, Link, Member, Plan, Replica, StageRange
from protocol.wire.status_json import SCHEMA, status_data
from tests.builders import keyed, status_of

MEASUREMENT = Measurement(keyed(0).peer, 7, 0, 0, 3.5, 3.25, 640, 12.5, 0.5, complete=True)
STATUS = replace(
    status_of(),
    measurements=(MEASUREMENT,),
    peers=tuple(replace(each, waits=(Wait.GROUP, Wait.PAYLOADS)) for each in status_of().peers),
)

FIELDS = {
    *("schema", "run", "spec", "phase", "message", "rounds_decided", "stage_rounds_committed"),
    *("stage_rounds_aborted", "peers", "measurements", "plan", "anchors_agree", "time", "round_number"),
    *("round_seconds", "expected_round_seconds", "remaining_seconds", "tokens_committed"),
    *("replicas", "tokens_per_second", "steps_done"),
}
PEER_FIELDS = {
    *(
        "peer",
        "role",
        "lifecycle",
        "round_number",
        "inner_step",
        "seconds_since_seen",
        "assignment",
        "estimates",
    ),
    *("reachability", "problem", "role_reason", "rests", "message", "waits"),
}


def test_programs_find_the_fields_that_they_know() -> None:
    """A field that is missing here breaks them: that needs another SCHEMA."""
    data = status_data(STATUS)
    assert data["schema"] == SCHEMA == 1
    assert data.keys() >= FIELDS
    assert data["peers"][0].keys() >= PEER_FIELDS
    assert data["peers"][0]["waits"] == [Wait.GROUP.value, Wait.PAYLOADS.value]
    assert data["spec"]["hash"] == STATUS.spec.hash
    assert data["spec"]["inner"]["steps"] == STATUS.spec.inner.steps


def test_the_plan_has_chains_and_no_addresses() -> None:
    members = (
        Member(keyed(0).peer, StageRange(0, 1), "10.0.0.7:1"),
        Member(keyed(1).peer, StageRange(1, 3), ""),
    )
    plan = Plan(3, 7, 640, (Replica(1, members, (Link(8, Dialer.UPSTREAM),)),), "a reason")
    data = status_data(replace(status_of(), plan=plan))
    assert data["plan"]["replicas"] == [
        {
            "index": 1,
            "members": [
                {"peer": keyed(0).peer, "stages": [0], "relayed": False},
                {"peer": keyed(1).peer, "stages": [1, 2], "relayed": False},
            ],
            "links": [{"k": 8, "dialer": "upstream"}],
            "weight": 1.0,
            "microbatches": 0,
        }
    ]
    assert "10.0.0.7" not in json.dumps(data)
    assert status_data(status_of())["plan"] is None


def test_numbers_that_json_does_not_have_are_null() -> None:
    measurement = replace(MEASUREMENT, validation_loss=math.nan, train_loss=math.inf)
    data = status_data(replace(STATUS, measurements=(measurement,)))
    assert (data["measurements"][0]["validation_loss"], data["measurements"][0]["train_loss"]) == (None, None)
    assert data["replicas"][0]["validation_loss"] is None
    assert json.loads(json.dumps(data, allow_nan=False)) == data
