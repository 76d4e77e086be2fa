"""A full replica over two devices, and a node for each of two devices, in runs of real processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from protocol.errors import ExitCode
from protocol.types import Role
from tests.builders import spec_of
from tests.support import commands
from tests.support.commands import hetnode
from tests.support.processes import ProcessSwarm
from tests.support.waiting import wait_until

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


def stages_on_two_devices(home: Path) -> Mapping[str, str]:
    """The environment of a person whose files are below `home`."""
    home.mkdir()
    own = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
    return {**os.environ, "HOME": str(home), **{name: str(home / name) for name in own}}


def test_what_ends_the_node_of_a_device_is_told_behind_its_name(tmp_path: Path) -> None:
    log, environment = tmp_path / "log", stages_on_two_devices(tmp_path / "home")
    given = ("join", "a-run", "--role", "stage", "--device", "cpu:2")
    assert commands.start(*given, log=log, environment=environment).wait(120) == ExitCode.STATE
    assert all(
        re.search(rf"^cpu {index} \| error .no-credentials.", log.read_text(), re.M) for index in (0, 1)
    )


@pytest.mark.slow  # the nodes themselves are those of every other test
def test_two_devices_are_the_two_members_of_a_pipeline_and_leave_in_order(tmp_path: Path) -> None:
    spec, log = spec_of(2, 0, 1, rounds=10_000, inner__steps=10), tmp_path / "log"
    with ProcessSwarm(spec, tmp_path / "swarm", {}) as swarm:
        swarm.start_coordinator()
        given = ("--role", "stage", "--device", "cpu:2", "--threads", "2", "--no-measure")
        network = ("--listen", "127.0.0.1:0", "--advertise", "127.0.0.1", "--no-port-mapping")
        command = ("join", "--invite-file", str(swarm.invite_file()), *given, *network)
        environment = stages_on_two_devices(tmp_path / "home")
        early = commands.start(*command, log=log, environment=environment)
        wait_until(lambda: len(psutil.Process(early.pid).children(recursive=True)) > 1, 60, "its nodes")
        early.send_signal(signal.SIGINT)  # its nodes are only starting
        assert early.wait(60) in (0, ExitCode.INTERRUPTED)
        joined = commands.start(*command, log=log, environment=environment)
        swarm.wait_round(3, 240)
        owners = {owner for each in swarm.decisions() for owner in each["owners"]}
        assert len(owners) == 2
        joined.send_signal(signal.SIGINT)
        assert joined.wait(120) == 0
        text = log.read_text()
        assert all(f"cpu {index} | " in text for index in (0, 1))
        assert text.count("left the run in order") == 2
        known = next(iter((tmp_path / "home").rglob("certificate.pem"))).parent
        again = commands.start("join", str(known), *given, *network, log=log, environment=environment)
        wait_until(lambda: log.read_text().count("joined run") >= 3, 120, "a node that has joined again")
        below = psutil.Process(again.pid).children(recursive=True)
        again.kill()  # the nodes see it, and leave
        wait_until(lambda: not any(each.is_running() for each in below), 60, "their ends")
