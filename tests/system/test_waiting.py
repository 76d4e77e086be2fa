"""Nodes that start before their coordinator wait for it, and then train."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.types import Role
from tests.builders import spec_of
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.swarm

SPEC = spec_of(1, 2, rounds=100_000)  # the test ends it: a node that is slow to come is never too late
NODES = {"known": Role.REPLICA, "newcomer": Role.REPLICA}


def test_nodes_that_start_first_wait_and_then_train(tmp_path: Path) -> None:
    with ProcessSwarm(SPEC, tmp_path, NODES) as swarm:
        swarm.start_coordinator("--one-port")
        swarm.start_node("known")
        swarm.wait_log("known", "joined run")  # it keeps its certificate; the run waits for one more replica
        swarm.kill("known")
        swarm.started[COORDINATOR].process.send_signal(signal.SIGINT)
        swarm.started[COORDINATOR].process.wait(60)
        for times in (1, 2):
            for name in NODES:
                swarm.start_node(name)
            for name in NODES:
                swarm.wait_log(name, "waiting for the coordinator", count=times)
            if times == 1:
                for name in NODES:
                    swarm.started[name].process.send_signal(signal.SIGINT)
                ended = [swarm.started[name].process.wait(30) for name in NODES]
                assert ended == [ExitCode.INTERRUPTED] * 2
        swarm.start_coordinator("--one-port")
        both = "a round with payloads of both"
        swarm.wait_until(lambda: any(len(each["owners"]) == 2 for each in swarm.decisions()), 120, both)
        for name in NODES:
            assert swarm.is_running(name), swarm.log(name)[-3000:]
            assert "the coordinator answers after" in swarm.log(name)
