"""'hetnode health' with real processes: of a node and of a coordinator, well and not."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode, imported_by
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.swarm

SPEC = spec_of(1, 1, rounds=100_000, inner__steps=4)


def test_the_health_of_a_node_and_of_its_coordinator(tmp_path: Path) -> None:
    node = str(tmp_path / "a")

    def fails(code: str, status: ExitCode, *arguments: str) -> bool:
        asked = hetnode("health", *arguments)
        return asked.returncode == status and f"[{code}]" in asked.stderr

    with ProcessSwarm(SPEC, tmp_path, {"a": Role.REPLICA}) as swarm:
        run = str(swarm.run)
        swarm.start()
        swarm.wait_round(1, 120)
        well = hetnode("health", node, check=True).stdout
        assert "the node takes part, in round " in well
        known = next((tmp_path / "a" / "identity.runs").iterdir())
        assert hetnode("health", str(known), "--away", "60", check=True).stdout.startswith(
            "the node takes part"
        )
        answers = hetnode("health", run, check=True).stdout
        assert "the coordinator answers: " in answers
        assert "rounds are decided" in answers
        # grpc, cryptography and more would make each question of a container's engine expensive.
        heavy = ("torch", "hivemind", "grpc", "cryptography", "uvloop")
        assert imported_by("health", node, names=heavy) == "[]"

        hetnode("pause", node, check=True)
        assert "the node rests: " in hetnode("health", node, "--away", "0", check=True).stdout
        hetnode("resume", node, check=True)
        swarm.wait_round(swarm.round_number + 1, 120)

        swarm.kill(COORDINATOR)
        assert fails("coordinator-unreachable", ExitCode.NETWORK, run)
        unreachable = ("coordinator-unreachable", ExitCode.NETWORK, node, "--away", "0")
        swarm.wait_until(lambda: fails(*unreachable), 60, "the node to miss its coordinator")
        hetnode("health", node, check=True)  # a coordinator may be away for some time

        swarm.stop("a")
        assert fails("node-not-running", ExitCode.STATE, node)
        swarm.resume("a")
        hetnode("health", node, check=True)
        swarm.kill("a")
        assert fails("node-not-running", ExitCode.STATE, node)

        swarm.start_node("a")  # while its coordinator is away
        swarm.wait_until(lambda: hetnode("health", node).returncode == 0, 60, "the node to start")
        assert "waits for its coordinator" in hetnode("health", node, check=True).stdout
