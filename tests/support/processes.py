"""Swarms of real processes whose nodes can be killed, stopped and started again, and what came of it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from node.checkpoint import global_model
from node.command_runner import VERBOSE
from node.ipc.template import ForkedProcess
from node.security.credentials import folder_of, load_operator
from node.views import run_history
from protocol.errors import ExitCode
from protocol.run_files.resolve import to_toml
from protocol.spec.run import RunSpec
from protocol.trust.run_id import run_id_of
from protocol.types import Role
from tests.support import commands
from tests.support.faults import FaultPlan
from tests.support.ports import free_port
from tests.support.waiting import is_alive, wait_until

COORDINATOR, STANDBY = "coordinator", "standby"


@dataclass
class Started:
    """The latest process of a name, and all that it has started."""

    process: subprocess.Popen[bytes] | ForkedProcess

    def tree(self) -> list[psutil.Process]:
        """The process and all its descendants that are alive."""
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []


class ProcessSwarm:
    """A coordinator and nodes, each its own tree of processes, below one folder. Use as a context manager.

    Args:
        folder: gets the run folder, one folder for each node, logs and fault reports.
        members: the nodes, by name.
        plan: what is to happen to them.
    """

    def __init__(
        self, spec: RunSpec, folder: Path, members: dict[str, Role], plan: FaultPlan | None = None
    ) -> None:
        self.spec, self.folder, self.members = spec, folder, members
        self.plan = plan or FaultPlan(folder / "faults")
        self.run = folder / "run"
        self.started: dict[str, Started] = {}
        self.restarts = 0
        self._seen: dict[int, psutil.Process] = {}
        # A short path, because those of sockets must be; a folder of its own, to see what is left in it.
        self._sockets = Path(tempfile.mkdtemp(prefix="t-"))
        self._address, self._dht_port = "127.0.0.1:0", free_port()
        self._copies, self._ports = 0, tuple(free_port() for _ in range(6))

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self.end()
        shutil.rmtree(self._sockets, ignore_errors=True)
        if kind is None:
            assert not left, f"processes that outlived their node: {left}"

    @property
    def run_id(self) -> str:
        """Known once the coordinator has made its authority."""
        return run_id_of(self.spec, load_operator(self.run)[1].pin)

    def start(self) -> None:
        """Start coordinator and nodes."""
        self.start_coordinator()
        for name in self.members:
            self.start_node(name)

    def start_coordinator(self, *options: str) -> None:
        """Start it, again at the same address; return when nodes can join."""
        file = self.folder / "run.toml"
        file.write_text(to_toml(self.spec))
        (self.run / "address").unlink(missing_ok=True)
        self._spawn(
            COORDINATOR,
            (
                *("coordinator", "--config", str(file), "--folder", str(self.run)),
                *("--listen", self._address, "--dht-port", str(self._dht_port)),
                *(() if "--one-port" in options else ("--enrolment-port", "0")),
                *options,
            ),
            {},
        )
        self.wait_until((self.run / "address").exists, 60, "the coordinator to listen")
        self._address = (self.run / "address").read_text().strip()

    def start_standby(self) -> None:
        """Let a backup of the coordinator's folder follow it; return when answers wait for it."""
        self._copies += 1
        copy, self._ports = self.folder / f"run-{self._copies}", (*self._ports[3:], *self._ports[:3])
        done = commands.hetnode("run", "backup", str(self.run), "--out", str(copy))
        assert done.returncode == 0, done.stderr
        api, enrollment, dht = map(str, self._ports[:3])
        where = "--listen", f"127.0.0.1:{api}", "--enrolment-port", enrollment, "--dht-port", dht
        count = self.log(COORDINATOR).count("has the whole log")
        self._spawn(STANDBY, ("coordinator", "--folder", str(copy), "--standby", *where), {})
        self.wait_log(COORDINATOR, "has the whole log", 60, count + 1)

    def take_over(self) -> None:
        """Let the standby go on in the place of the coordinator; return when nodes can join."""
        self.kill(STANDBY)
        self.run = self.folder / f"run-{self._copies}"
        (self.run / "address").unlink()
        where = "--folder", str(self.run), "--dht-port", str(self._ports[2])
        self._spawn(COORDINATOR, ("coordinator", *where, "--take-over"), {})
        self.wait_until((self.run / "address").exists, 60, "the standby to take over")

    def start_node(self, name: str) -> None:
        """Start a node: with an invite the first time, with its own credentials later."""
        own = self.folder / name
        key = own / "identity.key"
        known = folder_of(key, self.run_id)
        if (known / "certificate.pem").exists():
            where = [str(known)]
            self.restarts += 1
        else:
            where = ["--invite-file", str(self.invite_file())]
        self._spawn(
            name,
            (
                *("join", *where, "--role", self.members[name].value, "--no-measure"),
                *("--folder", str(own), "--identity", str(key)),
                *self.compute_options(name),
                *self.network_options(name),
            ),
            self.plan.environment(name),
        )

    def compute_options(self, name: str) -> Sequence[str]:
        """Options of `hetnode join` about how a node computes."""
        return ("--threads", "1")

    def network_options(self, name: str) -> Sequence[str]:
        """Options of `hetnode join` about the network of a node."""
        return ("--listen", "127.0.0.1:0", "--advertise", "127.0.0.1")

    def host_command(self, name: str) -> list[str]:
        """What starts a command on the host of `name`; empty for this one."""
        return []

    def is_running(self, name: str) -> bool:
        return name in self.started and self.started[name].process.poll() is None

    def status(self, name: str) -> int | None:
        return self.started[name].process.poll()

    def has_crashed(self, name: str, but: str = "nothing") -> bool:
        """Whether a supervisor would start the node again: a signal has ended it, or it found no network.

        AssertionError if it has ended with another error, unless the end of its log contains `but`.
        """
        status = self.status(name)
        if status in (None, 0):
            return False
        assert status is not None
        if status < 0 or status == ExitCode.NETWORK:
            return True
        end_of_log = self.log(name)[-3000:]
        assert but in end_of_log, f"{name} ended with {status}:\n{end_of_log}"
        return False

    def kill(self, name: str) -> None:
        """SIGKILL the main process. The other processes of its tree must end by themselves."""
        self._note_trees()
        self.started[name].process.kill()
        self.started[name].process.wait()

    def hivemind_of(self, name: str) -> dict[str, psutil.Process]:
        """The node's processes of hivemind by kind: host, DHT, p2pd. Empty while they are started."""
        for process in self.started[name].tree():
            with suppress(psutil.NoSuchProcess):
                if process.name() == "p2pd":
                    dht, host, *_ = process.parents()
                    return {"host": host, "DHT": dht, "p2pd": process}
        return {}

    def worker_of(self, name: str) -> psutil.Process:
        (worker,) = (each for each in self.started[name].tree() if each.name().endswith("worker.process"))
        return worker

    def kill_below(self, name: str, process: psutil.Process) -> None:
        """SIGKILL one process of the tree. The processes below it must end by themselves."""
        assert process in self.started[name].tree(), f"{process} is no process of {name}"
        self._note_trees()
        process.kill()

    def stop(self, name: str) -> None:
        """SIGSTOP the whole tree."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT the whole tree."""
        self._signal(name, signal.SIGCONT)

    def end(self) -> list[str]:
        """Kill all processes. Returns those that had outlived the main process of their tree."""
        self._note_trees()
        orphans = [
            process for process in self._seen.values() if is_alive(process) and not self._has_main(process)
        ]
        # They end soon after their parent.
        psutil.wait_procs(orphans, timeout=10)
        left = [" ".join(process.cmdline()) for process in orphans if is_alive(process)]
        for process in self._seen.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self.started.values():
            started.process.wait()
        psutil.wait_procs(list(self._seen.values()), timeout=10)
        return left

    def wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll until `condition`; AssertionError with the logs after `seconds`."""
        wait_until(condition, seconds, lambda: f"{what}\n{self.log_ends()}")

    def wait_round(self, number: int, seconds: float) -> None:
        """Wait until some stage of round `number` is decided."""
        self.wait_until(lambda: self.round_number >= number, seconds, f"round {number}")

    def wait_over(self, seconds: float, *names: str) -> None:
        """Wait until these nodes, or all, have ended well."""
        wanted = names or tuple(self.members)
        self.wait_until(
            lambda: not any(self.is_running(name) for name in wanted), seconds, f"the end of {wanted}"
        )
        failed = {name: self.status(name) for name in wanted if self.status(name) != 0}
        assert not failed, f"{failed}\n{self.log_ends()}"

    def keep_running_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Start every node again that a signal has ended, until `condition`."""

        def is_so() -> bool:
            for name in self.members:
                if (status := self.status(name)) is not None and status < 0:
                    self.start_node(name)
                assert status in (None, 0) or status < 0, (
                    f"{name} ended with {status}\n{self.log(name)[-3000:]}"
                )
            return condition()

        self.wait_until(is_so, seconds, what)

    def keep_running_to_the_end(self, stall_seconds: float = 120) -> None:
        """Start every node again that a signal has ended, until all have ended well.

        AssertionError if no round is decided for `stall_seconds`: a busy machine is slow, but not stuck.
        """
        ended = False

        def goes_on() -> bool:
            nonlocal ended
            ended = not any(map(self.is_running, self.members))
            return ended or self.round_number > decided

        while not ended:
            decided = self.round_number
            self.keep_running_until(goes_on, stall_seconds, f"a decision after round {decided}")

    def wait_log(self, name: str, text: str, seconds: float = 120, count: int = 1) -> None:
        """Wait until `text` is in the log of a node `count` times."""
        self.wait_until(
            lambda: self.log(name).count(text) >= count, seconds, f"{text!r} in the log of {name}"
        )

    def wait_fired(self, name: str, seconds: float, count: int = 1) -> None:
        """Wait until `count` planned faults have struck the node."""
        self.wait_until(
            lambda: len(self.plan.fired(name)) >= count,
            seconds,
            f"fault {count} of {name}, of {list(map(str, self.plan.faults_of(name)))}",
        )

    def events(self, kind: str, folder: Path | None = None) -> list[dict[str, Any]]:
        """The coordinator's metrics of one kind, or those of the one in `folder`."""
        file = (folder or self.run) / "metrics.jsonl"
        return [each for each in run_history.read_events(file) if each["event"] == kind]

    def decisions(self) -> list[dict[str, Any]]:
        return self.events("decision")

    @property
    def round_number(self) -> int:
        """The newest round of which some stage is decided; 0 before the first."""
        return max((each["round"] for each in self.decisions()), default=0)

    def peer(self, name: str) -> str:
        """The peer id of a node that has joined."""
        found = re.search(r"joined run .* peer (\w+),", self.log(name))
        assert found is not None, f"{name} has not joined"
        return found[1]

    def contributions(self, name: str) -> set[int]:
        """The rounds in whose commits a payload of the node counts, whatever the stage."""
        peer = self.peer(name)
        return {each["round"] for each in self.decisions() if peer in each["owners"]}

    def times_lost(self, name: str) -> int:
        """How often the coordinator has taken the node for lost."""
        peer = self.peer(name)
        return sum(each["change"] == "lost" and each["peer"] == peer for each in self.events("peer"))

    def anchors(self, name: str, rounds: int = 0) -> dict[int, str]:
        """Digests of the anchors in the node's newest checkpoint, by stage, of a run of `rounds` by now."""
        folder = global_model.latest(self.folder / name / "checkpoint")
        assert folder is not None, f"{name} has no checkpoint"
        found = global_model.read(folder)
        assert found.round_number == (rounds or self.spec.rounds), (
            f"{name} ended with round {found.round_number}"
        )
        return {
            stage: hashlib.sha256(
                b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
            ).hexdigest()
            for stage, tensors in found.stages.items()
        }

    def assert_all_agree(self, *names: str) -> None:
        """All rounds decided, each once, and bit-equal final anchors on all nodes."""
        keys = [(each["stage"], each["round"]) for each in self.decisions()]
        assert len(keys) == len(set(keys)), "a round was decided twice"
        assert len(keys) == self.spec.rounds * self.spec.swarm.stages, f"{len(keys)} decisions"
        digests: dict[int, set[str]] = {stage: set() for stage in range(self.spec.swarm.stages)}
        for name in names or self.members:
            for stage, digest in self.anchors(name).items():
                digests[stage].add(digest)
        assert all(len(found) == 1 for found in digests.values()), f"anchors differ: {digests}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def log_ends(self, most: int = 1500) -> str:
        """The end of every log."""
        return "\n".join(f"--- {name}\n{self.log(name)[-most:]}" for name in self.started)

    def _spawn(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        assert not self.is_running(name), name
        log = self.folder / f"{name}.log"
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HETNODE_")}
        if VERBOSE in os.environ:  # a test sets it that waits for a detail in a log
            clean[VERBOSE] = os.environ[VERBOSE]
        clean["TMPDIR"] = str(self._sockets)
        process: subprocess.Popen[bytes] | ForkedProcess
        before = self.host_command(name)
        if environment or before:
            # Its variables are read when Python starts.
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [*before, sys.executable, "-P", "-m", "node", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**clean, **environment},
                )
        else:
            process = commands.start(*arguments, log=log, environment=clean)
        self.started[name] = Started(process)

    def invite_file(self, uses: int = 100) -> Path:
        """The invite that all nodes use."""
        file = self.folder / "invite"
        if not file.exists():
            self.ask("invite", "create", "--uses", str(uses), "--folder", str(self.run), "--out", str(file))
        return file

    def invite(self, uses: int = 100) -> str:
        return self.invite_file(uses).read_text().strip()

    def ask(self, *arguments: str) -> str:
        """What a command prints, run on the coordinator's host; it must succeed."""
        before = self.host_command(COORDINATOR)
        if not before:
            return commands.hetnode(*arguments, check=True).stdout
        command = [*before, sys.executable, "-P", "-m", "node", *arguments]
        environment = {**os.environ, **commands.PLAIN}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    def _signal(self, name: str, number: int) -> None:
        self._note_trees()
        for process in self.started[name].tree():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _note_trees(self) -> None:
        for started in self.started.values():
            for process in started.tree():
                self._seen.setdefault(process.pid, process)

    def _has_main(self, process: psutil.Process) -> bool:
        """Whether the main process of its tree is alive."""
        return any(process in started.tree() for started in self.started.values())
