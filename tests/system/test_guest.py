"""A node is a guest on a machine: it goes when it is asked to, keeps what it has learned, and comes back.

`hetnode health` tells of the node and of its coordinator all the while.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from protocol.errors import ExitCode
from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode, imported_by
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


def health(*arguments: str) -> str:
    return hetnode("health", *arguments, check=True).stdout


def is_unwell(code: str, status: ExitCode, *arguments: str) -> bool:
    asked = hetnode("health", *arguments)
    return asked.returncode == status and f"[{code}]" in asked.stderr


def assert_is_told_of_its_rest(swarm: ProcessSwarm) -> None:
    (peer,) = json.loads(swarm.ask("status", "--json", str(swarm.run)))["peers"]
    told = " ".join(swarm.ask("explain", "--run", str(swarm.run), peer["peer"]).split())
    assert "rests: its machine lets it take no part for now" in told
    assert "hetnode join" not in told
    assert "which is paused on its machine" in " ".join(status(swarm).split())


def test_a_guest_rests_comes_back_and_leaves_without_its_coordinator(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    node, run = str(folder), str(tmp_path / "run")
    not_running = ("node-not-running", ExitCode.STATE, node)
    with ProcessSwarm(spec_of(1, 1, rounds=100_000, inner__steps=8), tmp_path, {"a": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_round(1, 120)
        main, *_ = swarm.started["a"].tree()
        assert "the node takes part, in round " in health(node)
        known = next((folder / "identity.runs").iterdir())
        assert health(str(known), "--away", "60").startswith("the node takes part")
        assert "the coordinator answers: " in health(run)
        assert "rounds are decided" in health(run)
        # grpc, cryptography and more would make each question of a container's engine expensive.
        heavy = ("torch", "hivemind", "grpc", "cryptography", "uvloop")
        assert imported_by(["health", node], names=heavy) == "[]"

        assert "paused by hand" in hetnode("pause", node, check=True).stdout
        assert (folder / "paused").exists()
        assert "the node rests: " in health(node, "--away", "0")
        # As soon as the resting process calls the coordinator, over a connection of its own.
        swarm.wait_until(lambda: "paused" in status(swarm), 30, "the status to show the pause")
        assert_is_told_of_its_rest(swarm)
        before = adam_steps(folder)
        swarm.wait_until(lambda: not children(main), 30, "the end of all other processes")
        assert "the node of" in hetnode("resume", node, check=True).stdout
        swarm.wait_round(swarm.round_number + 1, 120)
        assert main.is_running()
        assert "paused" not in status(swarm)
        assert swarm.times_lost("a") == 0

        swarm.kill(COORDINATOR)
        assert is_unwell("coordinator-unreachable", ExitCode.NETWORK, run)
        unreachable = ("coordinator-unreachable", ExitCode.NETWORK, node, "--away", "0")
        swarm.wait_until(lambda: is_unwell(*unreachable), 60, "the node to miss its coordinator")
        assert health(node), "a coordinator may be away for some time"
        swarm.stop("a")
        assert is_unwell(*not_running)
        swarm.resume("a")
        assert health(node)

        swarm.wait_log("a", "waiting for the coordinator", 60)
        swarm.started["a"].process.send_signal(signal.SIGTERM)
        # It would wait for the coordinator for two minutes.
        swarm.wait_over(60, "a")
        assert "leaving at once" in swarm.log("a")
        assert adam_steps(folder) > before
        assert is_unwell(*not_running)

        swarm.start_node("a")  # while its coordinator is away
        swarm.wait_until(lambda: hetnode("health", node).returncode == 0, 60, "the node to start")
        assert "waits for its coordinator" in health(node)

    asked = hetnode("pause", node)
    assert asked.returncode == ExitCode.STATE
    assert "node-not-running" in asked.stderr
