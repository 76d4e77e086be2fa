"""A node whose worker or template is killed, as a machine without memory does, starts them again."""

from __future__ import annotations

from pathlib import Path

import psutil

from protocol.types import Role
from tests.builders import spec_of
from tests.support.processes import ProcessSwarm


def test_a_node_outlives_its_worker_and_its_template_and_computes_smaller_pieces(tmp_path: Path) -> None:
    spec = spec_of(2, 2, 0, rounds=10_000, inner__steps=10, inner__microbatch_size=4)
    with ProcessSwarm(spec, tmp_path, {"a": Role.REPLICA, "b": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_round(2, 240)
        swarm.wait_until(lambda: bool(swarm.contributions("b")), 240, "the first payload")
        main = swarm.started["b"].process.pid

        def kill_and_go_on(process: psutil.Process) -> None:
            swarm.kill_below("b", process)
            before = swarm.round_number
            swarm.wait_until(
                lambda: max(swarm.contributions("b")) > before + 1, 240, "a payload after the death"
            )

        kill_and_go_on(swarm.worker_of("b"))
        assert "pieces" not in swarm.log("b")
        kill_and_go_on(swarm.worker_of("b"))
        swarm.wait_log("b", "a microbatch is computed in 2 pieces", count=1)
        (template,) = (each for each in swarm.started["b"].tree() if each.name() == "template")
        kill_and_go_on(template)
        assert swarm.is_running("b")
        assert swarm.started["b"].process.pid == main
        assert not swarm.events("diverged")
