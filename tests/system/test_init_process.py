"""Commands as process 1 of their own PID namespace, as in a container without an init."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from node.views import run_history
from protocol.errors import ExitCode
from protocol.run_files.resolve import to_toml
from tests.builders import spec_of
from tests.support.commands import hetnode
from tests.support.waiting import wait_until

pytestmark = pytest.mark.swarm

UNSHARE = ("unshare", "--fork", "--pid", "--mount-proc")
SPEC = spec_of(1, 1, rounds=100_000, inner__steps=4)


def why_not() -> str:
    """Why PID namespaces cannot be made here; "" if they can."""
    try:
        made = subprocess.run([*UNSHARE, "true"], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare"
    return made.stderr.strip()


class Container:
    """`command` as process 1; `log` gets its outputs."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self._unshare = subprocess.Popen([*UNSHARE, *command], stdout=output, stderr=output)
        self.wait(lambda: bool(psutil.Process(self._unshare.pid).children()), "process 1")
        self.first = psutil.Process(self._unshare.pid).children()[0]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        wait_until(condition, seconds, lambda: f"{what}\n{self.log.read_text()[-3000:]}")

    def said(self, text: str) -> None:
        self.wait(lambda: text in self.log.read_text(), text)

    def zombies(self) -> list[psutil.Process]:
        return [each for each in self.first.children() if each.status() == psutil.STATUS_ZOMBIE]

    def stop(self) -> int:
        """As ``docker stop``, but without the SIGKILL after ten seconds. Returns the exit status."""
        self.first.send_signal(signal.SIGTERM)
        return self.status()

    def status(self) -> int:
        return self._unshare.wait(60)

    def kill(self) -> None:
        for process in psutil.Process(self._unshare.pid).children() if self._unshare.poll() is None else ():
            process.kill()
        self._unshare.wait()


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    if reason := why_not():
        pytest.skip(f"no PID namespaces here: {reason}")
    started: list[Container] = []
    yield started
    for each in started:
        each.kill()


def hetnode_as_first(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "node", *arguments]


def test_a_node_and_its_coordinator_end_in_order_and_leave_no_zombies(
    tmp_path: Path, containers: list[Container]
) -> None:
    def start(name: str, *arguments: str) -> Container:
        containers.append(Container(hetnode_as_first(*arguments), tmp_path / f"{name}.log"))
        return containers[-1]

    run, invite, spec = tmp_path / "run", tmp_path / "invite", tmp_path / "run.toml"
    spec.write_text(to_toml(SPEC))
    listen = ("--listen", "127.0.0.1:0", "--enrolment-port", "0")
    coordinator = start("coordinator", "coordinator", "--config", str(spec), "--folder", str(run), *listen)
    coordinator.wait((run / "address").exists, "the coordinator to listen")

    def invited(role: str) -> tuple[str, str]:
        hetnode("invite", "create", "--role", role, "--folder", str(run), "--out", str(invite), check=True)
        return "--invite-file", str(invite)

    relay = start(
        *("relay", "relay", invited("relay")[1], "--listen", "127.0.0.1:0"),
        *("--identity", str(tmp_path / "relay.key")),
    )
    relay.said("relay of run")
    assert relay.stop() == ExitCode.INTERRUPTED

    def rounds() -> int:
        events = run_history.read_events(run / "metrics.jsonl")
        return max((each["round"] for each in events if each["event"] == "decision"), default=0)

    node = start(
        *("node", "join", *invited("replica"), "--identity", str(tmp_path / "a.key"), "--no-measure"),
        *("--folder", str(tmp_path / "a"), "--threads", "1", "--listen", "127.0.0.1:0"),
    )
    node.wait(lambda: rounds() > 0, "a round")
    (p2pd,) = (each for each in node.first.children(recursive=True) if each.name() == "p2pd")
    _, host, *_ = p2pd.parents()
    below = host.children(recursive=True)
    host.kill()  # the processes below it lose their parent, and end by themselves
    node.wait(lambda: not any(map(alive, below)), "the end of the orphans")
    node.wait(lambda: not node.zombies(), "the orphans to be collected")
    before = rounds()
    node.wait(lambda: rounds() > before + 1, "a round after the death of hivemind")

    assert node.stop() == 0
    node.said("left the run in order")
    assert coordinator.stop() == ExitCode.INTERRUPTED


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_that_still_starts_can_be_stopped(tmp_path: Path, containers: list[Container]) -> None:
    """It has no handler of its own yet."""
    program = (
        "import os, signal\n"
        "from node.ipc.init_process import continue_below_init\n"
        "continue_below_init()\n"
        "os.write(1, b'starts')\n"
        "signal.pause()\n"
    )
    containers.append(Container([sys.executable, "-c", program], tmp_path / "log"))
    containers[-1].said("starts")
    assert containers[-1].stop() == 128 + signal.SIGTERM


def test_the_status_of_the_command_is_that_of_the_container(
    tmp_path: Path, containers: list[Container]
) -> None:
    containers.append(Container(hetnode_as_first("health", str(tmp_path)), tmp_path / "log"))
    containers[-1].said("node-not-running")
    assert containers[-1].status() == ExitCode.STATE
