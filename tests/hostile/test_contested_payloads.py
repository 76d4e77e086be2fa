"""One of two replicas reports only its own payload as held: real processes of nodes and coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.hostile

ROUNDS = 4


def test_one_of_two_replicas_cannot_leave_out_the_payloads_of_the_other(tmp_path: Path) -> None:
    spec = spec_of(2, 2, rounds=ROUNDS, recovery__checkpoint_every=2)
    plan = FaultPlan(tmp_path / "faults")
    plan.fail_at("liar", None, None, Moment.GATHERED, Action.DENY, times=1000)
    members = {"honest": Role.REPLICA, "liar": Role.REPLICA}
    with ProcessSwarm(spec, tmp_path, members, plan) as swarm:
        swarm.start()
        swarm.wait_over(300)
        swarm.wait_over(60, COORDINATOR)
        swarm.assert_all_agree()
        assert swarm.contributions("honest") == swarm.contributions("liar") == set(range(1, ROUNDS + 1))
        assert swarm.log(COORDINATOR).count(f"contested payload of {swarm.peer('honest')}") == 2 * ROUNDS
        assert not [each for each in swarm.events("peer") if each["change"] == "strike"]
        kept = tmp_path / "run" / "contested"
        assert kept.is_dir()
        assert not list(kept.rglob("round-*")), "no peer needs them after the run"
    plan.assert_all_fired()
