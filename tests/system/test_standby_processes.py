"""Real coordinators are killed at random moments, and their standbys take the run over."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from coordinator.store.log_copy import read_copy
from protocol.errors import ExitCode
from protocol.types import Role
from tests.builders import decisions_in, spec_of
from tests.support import commands
from tests.support.processes import COORDINATOR, STANDBY, ProcessSwarm

NODES = {"a": Role.REPLICA, "b": Role.REPLICA}
SPEC = spec_of(2, 2, 0, rounds=2000, inner__steps=10, recovery__checkpoint_every=2, timing__heartbeat=1.0)


def decided(folder: Path) -> dict[tuple[int, int], str]:
    """What the log of a coordinator has decided of each (round, stage)."""
    decisions = decisions_in(read_copy(folder)[1])
    found = {(each.round_number, each.stage): repr(each) for each in decisions}
    assert len(found) == len(decisions), "a round was decided twice"
    return found


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 1), *(pytest.param(seed, 5, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_no_decision_is_lost_or_made_twice(tmp_path: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    with ProcessSwarm(SPEC, tmp_path, NODES) as swarm:
        swarm.start()
        swarm.wait_round(2, 240)
        for number in range(kills):
            former = swarm.run
            swarm.start_standby()
            time.sleep(chance.uniform(0, 3))  # the moment of the kill is random
            swarm.kill(COORDINATOR)
            swarm.take_over()
            told = {(each["round"], each["stage"]) for each in swarm.events("decision", former)}
            before, after = decided(former), decided(swarm.run)
            assert told, "the former coordinator has decided"
            assert all(before[key] == after[key] for key in told), "a decision was lost or changed"
            swarm.wait_round(max(after)[0] + 2, 120)
            for name in NODES:
                swarm.wait_log(name, "the coordinator has moved", count=number + 1)
        newest = swarm.round_number

        def both_count() -> bool:
            return any(each["round"] > newest and len(each["owners"]) == 2 for each in swarm.decisions())

        swarm.wait_until(both_count, 240, "that both nodes take part again")
        last = swarm.round_number + 4
        done = commands.hetnode("run", "change", str(swarm.run), "--set", f"rounds={last}")
        assert done.returncode == 0, done.stderr
        swarm.wait_over(240)
        found = decided(swarm.run)
        assert {each for each, _ in found} == set(range(1, last + 1))
        lost = {number for (number, _), each in found.items() if not each.startswith("Committed")}
        assert len(lost) <= kills, "at most the round that was open is lost"
        assert not swarm.events("diverged")
        assert swarm.anchors("a", last) == swarm.anchors("b", last)
        for name in NODES:
            assert swarm.times_lost(name) <= kills


@pytest.mark.slow
def test_a_standby_waits_for_its_disk_and_a_suspended_coordinator_ends(tmp_path: Path) -> None:
    with ProcessSwarm(SPEC, tmp_path, NODES) as swarm:
        swarm.start()
        swarm.wait_round(2, 240)
        swarm.start_standby()
        standby = swarm.started[STANDBY].tree()[0]
        standby.rlimit(psutil.RLIMIT_FSIZE, (1000, psutil.RLIM_INFINITY))
        swarm.wait_log(STANDBY, "[disk-full]")
        swarm.wait_log(COORDINATOR, "is on this machine alone")
        swarm.wait_round(swarm.round_number + 2, 120)
        standby.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        swarm.wait_log(COORDINATOR, "has the whole log", count=2)
        swarm.stop(COORDINATOR)
        former = swarm.run
        swarm.started["former"] = swarm.started.pop(COORDINATOR)
        swarm.take_over()
        swarm.resume("former")
        swarm.wait_until(lambda: not swarm.is_running("former"), 60, "the end of the former coordinator")
        assert swarm.status("former") == ExitCode.STATE
        told = {(each["round"], each["stage"]) for each in swarm.events("decision", former)}
        before, after = decided(former), decided(swarm.run)
        assert all(before[key] == after[key] for key in told), "a decision was made beside the standby"
        swarm.wait_round(max(after)[0] + 2, 120)
        assert not swarm.events("diverged")
