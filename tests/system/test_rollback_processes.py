"""A rollback of real processes, one of which is killed while it takes part."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.swarm

MIXED = {"a": Role.REPLICA, "b": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}


@pytest.mark.slow  # the virtual swarm plays the same faults in seconds
def test_a_node_and_the_coordinator_that_are_killed_in_a_rollback_take_it_when_they_are_back(
    tmp_path: Path,
) -> None:
    recovery = {"recovery__checkpoint_every": 2, "recovery__keep_rounds": 40}
    spec = spec_of(2, 2, 1, rounds=10_000, inner__steps=20, **recovery)
    with ProcessSwarm(spec, tmp_path, MIXED) as swarm:
        swarm.start()
        run = str(swarm.run)
        swarm.wait_round(9, 180)
        hetnode("run", "pause", run, "--reason", "a test", check=True)
        swarm.stop("b")  # it cannot know of the rollback
        # A peer says what it keeps with a heartbeat.
        swarm.wait_until(
            lambda: hetnode("rollback", run, "--to", "4", "--yes").returncode == 0, 60, "the rollback"
        )
        swarm.kill("q")
        swarm.resume("b")  # stopped children could not see the end of their parent
        swarm.kill("b")
        swarm.kill(COORDINATOR)
        swarm.start_coordinator()
        swarm.start_node("q")
        swarm.start_node("b")
        hetnode("run", "resume", run, check=True)
        reasons = {each["round"]: each["reason"] for each in swarm.decisions() if not each["committed"]}
        (restored,) = (number for number, reason in reasons.items() if "goes back to round 4" in reason)
        swarm.keep_running_until(
            lambda: all(max(swarm.contributions(name)) > restored + 1 for name in MIXED), 180, "all payloads"
        )
        assert not swarm.events("diverged")
        assert "anchors agree" in hetnode("status", run, check=True).stdout
