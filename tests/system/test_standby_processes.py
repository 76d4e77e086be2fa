"""Real coordinators are killed at random moments, and their standbys take the run over."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from coordinator.store.log_copy import read_copy
from protocol.types import Role
from tests.builders import decisions_in, spec_of
from tests.support import commands
from tests.support.processes import COORDINATOR, ProcessSwarm

NODES = {"a": Role.REPLICA, "b": Role.REPLICA}


def decided(folder: Path) -> dict[tuple[int, int], str]:
    """What the log of a coordinator has decided of each (round, stage)."""
    decisions = decisions_in(read_copy(folder)[1])
    found = {(each.round_number, each.stage): repr(each) for each in decisions}
    assert len(found) == len(decisions), "a round was decided twice"
    return found


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 2), *(pytest.param(seed, 5, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_no_decision_is_lost_or_made_twice(tmp_path: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    spec = spec_of(2, 2, 0, rounds=2000, inner__steps=10, recovery__checkpoint_every=2)
    with ProcessSwarm(spec, tmp_path, NODES) as swarm:
        swarm.start()
        swarm.wait_round(2, 240)
        for number in range(kills):
            former = swarm.run
            swarm.start_standby()
            time.sleep(chance.uniform(0, 4))  # the moment of the kill is random
            swarm.kill(COORDINATOR)
            swarm.take_over()
            told = {(each["round"], each["stage"]) for each in swarm.events("decision", former)}
            before, after = decided(former), decided(swarm.run)
            assert told, "the former coordinator has decided"
            assert all(before[key] == after[key] for key in told), "a decision was lost or changed"
            swarm.wait_round(max(after)[0] + 2, 120)
            for name in NODES:
                assert swarm.log(name).count("the coordinator has moved") == number + 1
        last = swarm.round_number + 8
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
