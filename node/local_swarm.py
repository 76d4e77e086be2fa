"""A whole swarm of real processes on one machine: what ``hetnode swarm up`` runs.

It only starts what a person would start by hand, ``hetnode coordinator`` and ``hetnode join``, watches the
coordinator's status, and ends every process that it started, whatever happens.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from node.measure.hardware import available_threads
from node.net.admin_client import AdminClient
from node.net.coordinator_client import fetch_status
from node.security.credentials import Credentials, exist, folder_of, load_operator
from protocol.errors import ErrorCode, HetnodeError
from protocol.roles import POLICIES
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.types import Role

_STOP_SECONDS = 4.5
_POLL_SECONDS = 0.5
_INVITE_SECONDS = 3600.0


_RESTARTS = 3


def initial_of(folder: Path) -> Path:
    """Where the nodes of a swarm in `folder` look for the parameters from which the run starts, if given."""
    return folder / "initial"


@dataclass(frozen=True)
class SwarmProcess:
    """One process of the swarm and the file that holds its output."""

    name: str
    process: asyncio.subprocess.Process
    log: Path


class Swarm:
    """The processes of one local swarm. Create it with :func:`run_swarm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.coordinator: SwarmProcess | None = None
        self.nodes: dict[str, SwarmProcess] = {}
        # Children watch the read end: it closes when this process ends, even by SIGKILL.
        self._lifeline_read, self._lifeline_write = os.pipe()
        os.set_inheritable(self._lifeline_read, True)

    async def start(self, name: str, arguments: Sequence[str]) -> SwarmProcess:
        """Start ``hetnode ARGUMENTS`` with its output in ``logs/NAME.log``."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a folder of the user's must not shadow our packages
                "-m",
                "node",
                *arguments,
                "--lifeline",
                str(self._lifeline_read),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._lifeline_read,),
                start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
            )
        return SwarmProcess(name, process, log)

    async def close(self) -> None:
        """End every process: SIGTERM, then SIGKILL for what is left of its session."""
        # The coordinator goes last, so that the nodes find it when they say farewell.
        for group in (list(self.nodes.values()), [self.coordinator] if self.coordinator else []):
            await _end(group)
        os.close(self._lifeline_write)
        os.close(self._lifeline_read)


async def _end(processes: Sequence[SwarmProcess]) -> None:
    for child in processes:
        if child.process.returncode is None:
            child.process.terminate()
    waits = [asyncio.create_task(child.process.wait()) for child in processes]
    if waits:
        await asyncio.wait(waits, timeout=_STOP_SECONDS)
    for child in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
    for wait in waits:
        await wait


def roles_to_start(spec: RunSpec) -> list[Role]:
    """The role of each node that the run needs before it starts, full replicas first."""
    needed = [(role, POLICIES[role].peers_needed(spec)) for role in reversed(POLICIES)]
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

    A folder in which a swarm of this spec has run before goes on where it was: coordinator and nodes find
    their state there.

    Args:
        spec: the resolved spec.
        spec_file: the same spec as a file that the processes read.
        folder: the run folder; coordinator, nodes and logs live in it.
        listen: HOST:PORT of the coordinator; port 0 takes a free one.
        on_status: called about twice a second with the coordinator's status.
        on_restart: told the name of a node that was killed and is started again.

    Raises HetnodeError: when a process fails, with the last words of its log; a node that was killed is
    started again a few times before. All processes have ended when this returns or raises, also when it is
    cancelled.
    """
    async with AsyncExitStack() as stack:
        swarm = Swarm(folder)
        stack.push_async_callback(swarm.close)
        former = _written_at(folder / "address")
        swarm.coordinator = await swarm.start(
            "coordinator",
            ["coordinator", "--config", str(spec_file), "--folder", str(folder), "--listen", listen],
        )
        swarm.address = await _address_of(swarm.coordinator, folder / "address", former)
        operator = load_operator(folder)
        roles = roles_to_start(spec)
        threads = max(1, available_threads() // len(roles))
        invite_file = await _invite(*operator, folder, len(roles))
        stack.callback(invite_file.unlink, missing_ok=True)

        async def start_node(name: str, role: Role, again: bool = False) -> None:
            own = folder / "nodes" / name
            key = own / "identity.key"
            known = folder_of(key, spec.run_id)
            # A coordinator that was started anew may listen elsewhere; the invite says where.
            invited = [str(known)] if again and exist(known) else ["--invite-file", str(invite_file)]
            options = ["--folder", str(own), "--identity", str(key), "--threads", str(threads)]
            options += ["--drain-seconds", "0"]  # all of them end together: nobody stays to be spared
            options.append("--no-measure")  # all nodes share one machine
            if spec.initial is not None:
                options += ["--initial", str(initial_of(folder))]
            swarm.nodes[name] = await swarm.start(
                name,
                [
                    *("join", *invited, "--role", role.value, *options),
                    *("--listen", "127.0.0.1:0", "--advertise", "127.0.0.1"),
                ],
            )

        names = {f"{number:02d}-{role.value}": role for number, role in enumerate(roles)}
        for name, role in names.items():
            await start_node(name, role)

        async def restart(name: str) -> None:
            on_restart(name)
            await start_node(name, names[name], again=True)

        await _watch(swarm, folder, on_status, restart)
        return swarm


async def _invite(address: str, operator: Credentials, folder: Path, uses: int) -> Path:
    """A file, for this user alone, with an invite for all nodes: others could see it in command lines."""
    async with AdminClient(address, operator) as admin:
        invite, _ = await admin.create_invite(uses, _INVITE_SECONDS, None)
    path = folder / "invite"
    path.unlink(missing_ok=True)  # of a swarm that was killed
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{invite}\n")
    return path


def _written_at(file: Path) -> int:
    """When, in nanoseconds; 0 where there is none."""
    return file.stat().st_mtime_ns if file.exists() else 0


async def _address_of(coordinator: SwarmProcess, file: Path, former: int) -> str:
    """Wait until the coordinator has written the address on which it listens; `former` is of another one."""
    while _written_at(file) in (0, former):
        if coordinator.process.returncode is not None:
            raise _failure(coordinator)
        await asyncio.sleep(0.05)
    return file.read_text().strip()


async def _watch(
    swarm: Swarm,
    folder: Path,
    on_status: Callable[[RunStatus], None],
    restart: Callable[[str], Awaitable[None]],
) -> None:
    """Show the status until all nodes have ended well; the first failure ends the swarm.

    A node that a signal has ended is none: it is started again, as a supervisor would do.
    """
    assert swarm.coordinator is not None
    coordinator_end = asyncio.create_task(swarm.coordinator.process.wait())
    pending = {asyncio.create_task(node.process.wait()): name for name, node in swarm.nodes.items()}
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
                    await restart(name)
                    pending[asyncio.create_task(swarm.nodes[name].process.wait())] = name
                elif task.result() != 0:
                    raise _failure(swarm.nodes[name])
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


def _failure(child: SwarmProcess) -> HetnodeError:
    """The failure of a process in its own last words."""
    lines = child.log.read_text(errors="replace").strip().splitlines()
    code = child.process.returncode
    coded = next(
        (match for line in reversed(lines) if (match := re.search(r"error \[([a-z-]+)\] (.*)", line))), None
    )
    if coded is not None:
        remedy = f"Its whole log is {child.log}."
        return HetnodeError(ErrorCode.from_label(coded[1]), f"{child.name}: {coded[2]}", remedy)
    last = next((line for line in reversed(lines) if "[" in line), lines[-1] if lines else "it said nothing")
    return HetnodeError(
        ErrorCode.SWARM_PROCESS_FAILED,
        f"The process {child.name} ended with status {code}: {last.strip()[:500]}",
        f"Its whole log is {child.log}.",
    )
