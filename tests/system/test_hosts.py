"""One peer on two hosts, which torchrun starts, in a run of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import PLAIN, hetnode
from tests.support.ports import free_port
from tests.support.processes import ProcessSwarm, Started

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
HOSTS = 2


class SwarmWithHosts(ProcessSwarm):
    """Its node "b" has two ranks, each below a torchrun of its own: "b" and "b1"."""

    def _spawn(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        if name != "b":
            super()._spawn(name, arguments, environment)
            return
        port = str(free_port())
        for rank, process in enumerate(("b", "b1")):
            with (self.folder / f"{process}.log").open("ab") as output:
                started = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "torch.distributed.run"),
                        *("--nnodes", str(HOSTS), "--nproc-per-node", "1", "--node-rank", str(rank)),
                        *("--master-addr", "127.0.0.1", "--master-port", port),
                        *("-m", "node", *arguments),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, **PLAIN, "TMPDIR": str(self._sockets)},
                )
            self.started[process] = Started(started)

    def follower(self) -> psutil.Process:
        """The main process of rank 1."""
        torchrun = psutil.Process(self.started["b1"].process.pid)
        (found,) = [each for each in torchrun.children() if "join" in each.cmdline()]
        return found


def test_two_hosts_form_one_peer_with_the_anchors_of_all_others(tmp_path: Path) -> None:
    spec = spec_of(2, 2, 0, rounds=8)
    with SwarmWithHosts(spec, tmp_path, {"a": Role.REPLICA, "b": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_until(lambda: not swarm.is_running("b1"), 300, "the end of the follower")
        swarm.wait_over(120, "a", "b", "b1")
        assert swarm.contributions("b")
        swarm.assert_all_agree()


def wait_payload(swarm: ProcessSwarm, after: int) -> None:
    """Wait for a payload of "b" in a later round."""
    swarm.wait_until(
        lambda: max(swarm.contributions("b"), default=0) > after, 240, f"a payload after round {after}"
    )


def test_a_worker_that_dies_on_another_host_is_started_again_with_a_smaller_microbatch(
    tmp_path: Path,
) -> None:
    spec = spec_of(2, 2, 0, rounds=10_000, inner__steps=10)
    with SwarmWithHosts(spec, tmp_path, {"a": Role.REPLICA, "b": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_round(1, 240)
        for _ in range(2):
            wait_payload(swarm, swarm.round_number)
            below = swarm.follower().children(recursive=True)
            (worker,) = [each for each in below if each.name().endswith("worker.process")]
            swarm.kill_below("b1", worker)
        wait_payload(swarm, swarm.round_number + 1)
        assert swarm.log("b1").count("This rank starts it again.") == 2
        assert "a microbatch is computed in 2 pieces" in swarm.log("b")
        assert not swarm.events("diverged")


def test_a_killed_follower_ends_both_hosts_with_one_error_and_the_next_start_goes_on(tmp_path: Path) -> None:
    spec = spec_of(2, 2, 0, rounds=10_000, inner__steps=10)
    with SwarmWithHosts(spec, tmp_path, {"a": Role.REPLICA, "b": Role.REPLICA}) as swarm:
        swarm.start()
        swarm.wait_round(3, 240)
        swarm.wait_until(lambda: {1, 2, 3} <= swarm.contributions("b"), 240, "payloads of both ranks")
        swarm.kill_below("b1", swarm.follower())
        swarm.wait_until(
            lambda: not swarm.is_running("b") and not swarm.is_running("b1"), 240, "the end of both hosts"
        )
        assert swarm.log("b").count("error [rank-failed] 1 of 2 ranks of this peer have not come") == 1
        before = swarm.round_number
        swarm.start_node("b")
        swarm.wait_until(lambda: max(swarm.contributions("b")) > before, 240, "a payload after the restart")
        assert not swarm.events("diverged")
        assert "anchors agree" in hetnode("status", str(swarm.run), check=True).stdout
