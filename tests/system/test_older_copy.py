"""A coordinator started from an older copy of its folder: nodes wait, and one command lets the run go on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support import commands
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.swarm

NODES = {"a": Role.REPLICA, "b": Role.REPLICA}


def test_the_run_goes_on_from_what_nodes_hold(tmp_path: Path) -> None:
    spec = spec_of(2, 2, 0, rounds=16, inner__steps=10, recovery__checkpoint_every=2)
    with ProcessSwarm(spec, tmp_path, NODES) as swarm:
        swarm.start()
        swarm.wait_round(2, 240)
        done = commands.hetnode("run", "backup", str(swarm.run), "--out", str(tmp_path / "older"))
        assert done.returncode == 0, done.stderr
        swarm.wait_round(6, 240)
        swarm.kill(COORDINATOR)
        newest = swarm.round_number
        swarm.run.rename(tmp_path / "lost")
        shutil.copytree(tmp_path / "older", swarm.run)
        swarm.start_coordinator()
        for name in NODES:
            swarm.wait_log(name, "[coordinator-behind]", 120)
            assert "'hetnode rollback'" in swarm.log(name)

        def listed() -> list[int]:
            done = commands.hetnode("rollback", str(swarm.run))
            found = re.findall(r"^\W*(\d+)\W+0\W+0\W+yes", done.stdout, re.MULTILINE)
            return [int(each) for each in found if int(each) > 2]

        for name in NODES:  # they tell what they hold with their next join: until then each question is work
            swarm.wait_log(name, "[coordinator-behind]", 120, count=2)
        swarm.wait_until(lambda: bool(listed()), 120, "what nodes hold")
        adopted = max(listed())
        # Where the coordinator died between two stages, the newest round of both is that on the disks.
        is_from_disk = adopted < newest - 1
        assert newest - 2 <= adopted <= newest
        assert not is_from_disk or adopted % 2 == 0
        done = commands.hetnode("rollback", str(swarm.run), "--to", str(adopted), "--yes")
        assert done.returncode == 0, done.stderr
        assert "the run goes on" in done.stdout
        swarm.wait_over(240)
        assert not swarm.events("diverged")
        assert swarm.anchors("a") == swarm.anchors("b")
        for name in NODES:
            assert (f"goes back to round {adopted}" in swarm.log(name)) == is_from_disk
            assert "parameters before" not in swarm.log(name)
            assert max(swarm.contributions(name)) == spec.rounds
