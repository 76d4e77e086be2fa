"""A coordinator that is started again at another address of its machine goes on with its nodes."""

from __future__ import annotations

import signal
from pathlib import Path

from node.security.credentials import folder_of, load
from protocol.types import Role
from tests.builders import spec_of
from tests.support.ports import free_port
from tests.support.processes import COORDINATOR, ProcessSwarm

NODES = {"a": Role.REPLICA, "b": Role.REPLICA}


def test_nodes_find_a_coordinator_that_listens_elsewhere(tmp_path: Path) -> None:
    with ProcessSwarm(spec_of(1, 2, rounds=100_000), tmp_path, NODES) as swarm:
        swarm.start()
        both = "a round with payloads of both"
        swarm.wait_until(lambda: any(len(each["owners"]) == 2 for each in swarm.decisions()), 240, both)
        swarm.started[COORDINATOR].process.send_signal(signal.SIGINT)
        swarm.started[COORDINATOR].process.wait(60)
        before = swarm.round_number
        swarm.start_coordinator("--listen", f"127.0.0.1:{free_port()}")
        swarm.wait_until(
            lambda: any(len(each["owners"]) == 2 and each["round"] > before for each in swarm.decisions()),
            240,
            both,
        )
        address = (swarm.run / "address").read_text()
        for name in NODES:
            assert swarm.is_running(name), swarm.log(name)[-3000:]
            assert load(folder_of(swarm.folder / name / "identity.key", swarm.run_id)).api == address
