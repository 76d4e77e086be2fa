"""A node of a virtual swarm, with its disk and its device, and what a test does to its process."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from safetensors import safe_open

from node.home.guest.guest import Guest, GuestRule
from node.security.identity import Identity
from protocol.errors import HetnodeError
from protocol.roles import RoleWish
from protocol.types import Role
from tests.virtual.loop import VirtualProcess
from tests.virtual.worker import VirtualWorker


@dataclass
class VirtualNode:
    """A node and its machine. The files are kept when the node is started again.

    Attributes:
        speed: of the device; 1 is usual.
        dial_only: no other node can open connections to it.
        errors: the errors that ended the node, one for each time.
    """

    name: str
    role: Role | RoleWish
    folder: Path
    identity: Identity
    speed: float = 1.0
    dial_only: bool = False
    process: VirtualProcess | None = None
    task: asyncio.Task[Path] | None = None
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    rules: tuple[GuestRule, ...] = ()
    memory_limit: int = 0
    own_data: tuple[str, ...] = ("any",)
    guest: Guest | None = None
    worker: VirtualWorker | None = None
    errors: list[HetnodeError] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return (
            self.task is not None and not self.task.done() and not (self.process and self.process.has_ended)
        )

    @property
    def has_finished(self) -> bool:
        """Whether it took part until the end of the run."""
        return self.task is not None and self.task.done() and self.task.exception() is None

    @property
    def anchors(self) -> dict[int, str]:
        """sha-256 of the tensors in the last checkpoint of a node that has finished, by stage."""
        assert self.task is not None
        folder = self.task.result()
        return {int(path.stem[6:]): _digest_of(path) for path in folder.glob("stage-*.safetensors")}


class Processes(Protocol):
    """What kills and suspends the processes of nodes by name."""

    def kill(self, *names: str) -> None: ...

    def suspend(self, name: str, seconds: float) -> None: ...


@dataclass(frozen=True)
class VirtualProcessControl:
    """Kills and suspends the process of the node `name` for a fault script."""

    processes: Processes
    name: str

    def kill(self) -> None:
        self.processes.kill(self.name)

    def stop(self, seconds: float) -> None:
        self.processes.suspend(self.name, seconds)

    pause = stop


def _digest_of(path: Path) -> str:
    """sha-256 over the names and bytes of the tensors in a safetensors file."""
    found = hashlib.sha256()
    with safe_open(path, framework="numpy") as file:
        for name in sorted(file.keys()):
            found.update(name.encode() + file.get_tensor(name).tobytes())
    return found.hexdigest()
