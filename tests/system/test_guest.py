"""A node is a guest on a machine: it goes when it is asked to, keeps what it has learned, and comes back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.swarm


def adam_steps(folder: Path) -> int:
    """Inner steps in all, by the newest checkpoint of the node in `folder`."""
    newest = max((folder / "checkpoint").glob("round-*"))
    private = json.loads((newest / "private" / "private.json").read_text())
    return int(private["stages"]["0"]["moments"]["steps"])


def children(main: psutil.Process) -> list[psutil.Process]:
    """Those that have memory: an ended template may stay as an entry in the table of processes."""
    found = main.children(recursive=True)
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


def status(swarm: ProcessSwarm) -> str:
    return swarm.ask("status", str(swarm.run))


def test_a_guest_rests_comes_back_and_leaves_without_its_coordinator(tmp_path: Path) -> None:
    spec = spec_of(1, 1, rounds=1000, inner__steps=8)
    folder = tmp_path / "a"
    with ProcessSwarm(spec, tmp_path, {"a": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_round(1, 120)
        main, *_ = swarm.started["a"].tree()

        rested = hetnode("pause", str(folder), check=True).stdout
        assert "paused by hand" in rested
        assert (folder / "paused").exists()
        # As soon as the resting process calls the coordinator, over a connection of its own.
        swarm.wait_until(lambda: "paused" in status(swarm), 30, "the status to show the pause")
        before = adam_steps(folder)
        swarm.wait_until(lambda: not children(main), 30, "the end of all other processes")
        assert "the node of" in hetnode("resume", str(folder), check=True).stdout
        done = swarm.round_number
        swarm.wait_round(done + 1, 120)
        assert main.is_running()
        assert "paused" not in status(swarm)
        assert swarm.times_lost("a") == 0

        swarm.kill(COORDINATOR)
        swarm.wait_until(lambda: "waiting for the coordinator" in swarm.log("a"), 60, "the node to notice")
        swarm.started["a"].process.send_signal(signal.SIGTERM)
        # It would wait for the coordinator for two minutes.
        swarm.wait_over(60, "a")
        assert "leaving at once" in swarm.log("a")
        assert adam_steps(folder) > before

    asked = hetnode("pause", str(folder))
    assert asked.returncode == 7
    assert "node-not-running" in asked.stderr
