"""A whole swarm of real processes on one machine: what ``hetnode swarm up`` runs.

It starts ``hetnode coordinator`` and ``hetnode join`` as a person would, watches the status of the run, and
ends every process that it started, also after a failure.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from node.checkpoint.layout import round_folder
from node.command_runner import LIFELINE
from node.data.own import ANY
from node.ipc.modules import COMMAND, COMMAND_MODULES
from node.ipc.template import ForkedProcess, close_own_template, own_template
from node.measure.hardware import available_threads
from node.net.coordinator_channel import CoordinatorChannel, fetch_status
from node.security.credentials import Credentials, exist, folder_of, load_operator
from protocol.errors import FAILURE_FILE, ErrorCode, HetnodeError
from protocol.roles import POLICIES
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.private_file import write_private
from protocol.trust.run_id import run_id_of
from protocol.types import Role
from protocol.wire.operator_calls import IssueInvite

_STOP_SECONDS = 4.5
_POLL_SECONDS = 0.5
_INVITE_SECONDS = 3600.0
_RESTARTS = 3


def initial_of(folder: Path) -> Path:
    """The folder of the parameters from which the run in `folder` starts, if it starts from given ones."""
    return folder / "initial"


@dataclass(frozen=True)
class SwarmProcess:
    """One process of the swarm and the file that holds its output."""

    name: str
    process: ForkedProcess
    log: Path


class Swarm:
    """The processes of one local swarm. Create it with :func:`run_swarm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.coordinator: SwarmProcess | None = None
        self.nodes: dict[str, SwarmProcess] = {}
        # Each process watches the read end: it closes when this process ends, even by SIGKILL.
        self._lifeline_read, self._lifeline_write = os.pipe()

    def start(self, name: str, arguments: Sequence[str]) -> SwarmProcess:
        """Start ``hetnode ARGUMENTS`` with its output in ``logs/NAME.log``."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        _failure_file(log).unlink(missing_ok=True)
        with log.open("ab") as output:
            # One template for all processes of the swarm: this machine imports torch and the transport once.
            process = own_template(COMMAND_MODULES).fork(
                COMMAND,
                arguments,
                environment={
                    **os.environ,
                    FAILURE_FILE: str(_failure_file(log).absolute()),
                    LIFELINE: str(self._lifeline_read),
                },
                descriptors=[self._lifeline_read],
                stdout=output.fileno(),
                stderr=output.fileno(),
                with_template=True,
            )
        return SwarmProcess(name, process, log)

    async def close(self) -> None:
        """End every process: SIGTERM, then SIGKILL for what is left of its session."""
        if self.coordinator is None or not self.coordinator.process.has_begun:
            close_own_template()  # nobody waits for its imports; what it forks just now sees the lifeline end
            self.coordinator = None
        # The coordinator ends last: the nodes tell it that they leave.
        for group in (list(self.nodes.values()), [self.coordinator] if self.coordinator else []):
            await _end(group)
        os.close(self._lifeline_write)
        os.close(self._lifeline_read)


async def _end(processes: Sequence[SwarmProcess]) -> None:
    for child in processes:
        if child.process.poll() is None:
            child.process.terminate()
    waits = [asyncio.create_task(child.process.wait_async()) for child in processes]
    if waits:
        await asyncio.wait(waits, timeout=_STOP_SECONDS)
    for child in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
    for wait in waits:
        await wait


def roles_to_start(spec: RunSpec) -> list[Role]:
    """The role of each node that the run needs before it starts, full replicas first."""
    needed = [(role, POLICIES[role].peers_needed(spec)) for role in reversed(tuple(POLICIES))]
    return [role for role, count in needed for _ in range(count)]


async def run_swarm(
    spec: RunSpec,
    spec_file: Path,
    folder: Path,
    listen: str,
    on_status: Callable[[RunStatus], None],
    on_restart: Callable[[str], None],
) -> Swarm:
    """Run a swarm of the shape in `spec` until the run is finished.

    A swarm in a `folder` in which it has run before continues. `spec_file` holds `spec` for the processes;
    `listen` is HOST:PORT of the coordinator, where port 0 takes a free one. `on_status` is called about twice
    a second; `on_restart` with the name of a node that was killed by a signal and is started again, a few
    times at most. All processes have ended when this returns, raises or is cancelled.

    Raises HetnodeError: a process failed; the message is the last error in its log.
    """
    async with AsyncExitStack() as stack:
        swarm = Swarm(folder)
        stack.push_async_callback(swarm.close)
        former = _written_at(folder / "address")
        swarm.coordinator = swarm.start(
            "coordinator",
            ["coordinator", "--config", str(spec_file), "--folder", str(folder), "--listen", listen],
        )
        swarm.address = await _address_of(swarm.coordinator, folder / "address", former)
        roles = roles_to_start(spec)
        address, operator = load_operator(folder)
        invite_file = await _invite(address, operator, folder, len(roles))
        run = run_id_of(spec, operator.pin)
        stack.callback(invite_file.unlink, missing_ok=True)
        starter = _NodeStarter(
            swarm, spec, run, invite_file, threads=max(1, available_threads() // len(roles))
        )
        names = {f"{i:02d}-{role.value}": role for i, role in enumerate(roles)}
        for name, role in names.items():
            starter.start(name, role)

        def restart(name: str) -> None:
            on_restart(name)
            starter.start(name, names[name], again=True)

        await _watch(swarm, folder, on_status, restart)
        return swarm


def keep_model(spec: RunSpec, folder: Path) -> int:
    """Put the parts of a finished run's model together in ``checkpoint`` of its folder. Waits for a process.

    Returns its exit status: where that is not 0, it has said why on standard error.
    """
    parts = sorted(folder.glob(f"nodes/*/checkpoint/{round_folder(spec.rounds)}"))
    # In a process of the template, because this one has not imported torch.
    command = ["export", "--format", "checkpoint", *map(str, parts), str(folder / "checkpoint")]
    with open(os.devnull, "wb") as nowhere:
        return own_template(COMMAND_MODULES).fork(COMMAND, command, stdout=nowhere.fileno()).wait()


@dataclass(frozen=True)
class _NodeStarter:
    """Starts nodes with ``hetnode join``, each with `threads` CPU threads."""

    swarm: Swarm
    spec: RunSpec
    run: str
    invite_file: Path
    threads: int

    def start(self, name: str, role: Role, again: bool = False) -> None:
        own = self.swarm.folder / "nodes" / name
        key = own / "identity.key"
        known = folder_of(key, self.run)
        # A restarted coordinator may listen elsewhere: the invite holds its new address.
        invited = [str(known)] if again and exist(known) else ["--invite-file", str(self.invite_file)]
        options = ["--role", role.value, "--folder", str(own), "--identity", str(key)]
        options += ["--threads", str(self.threads), "--listen", "127.0.0.1:0", "--advertise", "127.0.0.1"]
        options += ["--device", "cpu"]  # all nodes share one machine
        options += ["--drain-seconds", "0"]  # all nodes end together: no other node needs the time
        options += ["--no-measure", "--yes"]
        options += ["--data", ANY]  # the operator of the swarm is the owner of this machine
        if self.spec.initial is not None:
            options += ["--initial", str(initial_of(self.swarm.folder))]
        self.swarm.nodes[name] = self.swarm.start(name, ["join", *invited, *options])


async def _invite(address: str, operator: Credentials, folder: Path, uses: int) -> Path:
    """A file with an invite for all nodes, readable by this user alone. Command lines are readable by all."""
    async with CoordinatorChannel(address, operator) as admin:
        invite = (await admin.ask(IssueInvite(uses, _INVITE_SECONDS))).invite
    path = folder / "invite"
    write_private(path, f"{invite}\n".encode())
    return path


def _written_at(file: Path) -> int:
    """Time of the last write to `file` in nanoseconds; 0 if it does not exist."""
    return file.stat().st_mtime_ns if file.exists() else 0


async def _address_of(coordinator: SwarmProcess, file: Path, former: int) -> str:
    """The address in `file` once the coordinator has written it, later than at time `former`."""
    while _written_at(file) in (0, former):
        if coordinator.process.poll() is not None:
            raise _failure(coordinator)
        await asyncio.sleep(0.05)
    return file.read_text().strip()


async def _watch(
    swarm: Swarm, folder: Path, on_status: Callable[[RunStatus], None], restart: Callable[[str], None]
) -> None:
    """Report the status until all nodes have ended. Raises HetnodeError on the first failure.

    A node that a signal ended is started again, as a supervisor would do. One that came too late for a run
    that has finished has not failed.
    """
    assert swarm.coordinator is not None
    coordinator_end = asyncio.create_task(swarm.coordinator.process.wait_async())
    pending = {asyncio.create_task(node.process.wait_async()): name for name, node in swarm.nodes.items()}
    restarts = Counter[str]()
    try:
        while pending:
            done, _ = await asyncio.wait(
                {*pending, coordinator_end}, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done & set(pending):
                name = pending.pop(task)
                restarts[name] += 1
                if task.result() < 0 and restarts[name] <= _RESTARTS:
                    restart(name)
                    pending[asyncio.create_task(swarm.nodes[name].process.wait_async())] = name
                elif task.result() != 0:
                    failure = _failure(swarm.nodes[name])
                    # Where a run goes on, the others may have finished it before this node was in it.
                    if failure.code is not ErrorCode.RUN_STARTED:
                        raise failure
            if coordinator_end.done():
                if coordinator_end.result() != 0:
                    raise _failure(swarm.coordinator)
                break
            with suppress(HetnodeError):
                on_status(await fetch_status(*load_operator(folder), deadline=2.0))
        if pending:
            await asyncio.wait(pending, timeout=_STOP_SECONDS)
    finally:
        for task in (*pending, coordinator_end):
            task.cancel()


def _failure_file(log: Path) -> Path:
    """Where the process with this log writes its failure."""
    return log.with_suffix(".failure")


def _failure(child: SwarmProcess) -> HetnodeError:
    """The failure of a process: what it has written of it, or else the last line of its log."""
    remedy = f"See its log {child.log}."
    with suppress(OSError, ValueError, KeyError):
        told = json.loads(_failure_file(child.log).read_text())
        return HetnodeError(ErrorCode.from_label(told["code"]), f"{child.name}: {told['cause']}", remedy)
    lines = child.log.read_text(errors="replace").strip().splitlines()
    status, last = child.process.poll(), lines[-1] if lines else "its log is empty"
    cause = f"The process {child.name} ended with status {status}: {last.strip().rstrip('.')[:500]}."
    return HetnodeError(ErrorCode.SWARM_PROCESS_FAILED, cause, remedy)
