"""A full replica over two devices, in a run of real processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode
from tests.support.processes import ProcessSwarm

pytestmark = pytest.mark.swarm


class SwarmWithDevices(ProcessSwarm):
    """Of its nodes, "b" has two ranks."""

    def compute_options(self, name: str) -> Sequence[str]:
        return ("--device", "cpu:2", "--threads", "2") if name == "b" else super().compute_options(name)


@pytest.mark.slow  # tests/node/ranks checks the numbers, and the end of a rank, in less time
def test_a_node_outlives_a_killed_rank(tmp_path: Path) -> None:
    spec = spec_of(2, 2, 0, rounds=10_000, inner__steps=10)
    with SwarmWithDevices(spec, tmp_path, {"a": Role.REPLICA, "b": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_round(3, 240)
        swarm.wait_until(lambda: {1, 2, 3} <= swarm.contributions("b"), 240, "payloads of both ranks")
        workers = [each for each in swarm.started["b"].tree() if each.name().endswith("worker.process")]
        swarm.kill_below("b", max(workers, key=lambda each: each.pid))
        swarm.wait_log("b", "The worker of rank 1 process has ended", 60)
        before = swarm.round_number
        swarm.wait_until(lambda: max(swarm.contributions("b")) > before, 240, "a payload after the restart")
        assert swarm.is_running("b")
        assert not swarm.events("diverged")
        assert "anchors agree" in hetnode("status", str(swarm.run), check=True).stdout
