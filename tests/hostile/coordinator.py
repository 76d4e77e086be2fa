"""A real ``hetnode coordinator`` process, to which the independent peers of a test talk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from node.ipc.template import ForkedProcess
from tests.hostile.peer import Peer
from tests.support import commands
from tests.support.waiting import wait_until

START_SECONDS = 120.0


@dataclass(frozen=True)
class Coordinator:
    """A process and its folder. It is a swarm without nodes for tests.hostile.measure."""

    process: ForkedProcess
    folder: Path

    @property
    def started(self) -> dict[str, Coordinator]:
        return {"coordinator": self}

    def tree(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The metrics of one kind."""
        text = (self.folder / "run" / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]

    def decisions(self) -> list[dict[str, Any]]:
        return self.lines("decision")

    def invite(self, uses: int = 100) -> str:
        out = self.folder / f"invite-{uses}"
        if not out.exists():
            options = ("--uses", str(uses), "--folder", str(self.folder / "run"), "--out", str(out))
            commands.hetnode("invite", "create", *options, check=True)
        return out.read_text().strip()

    def has_started(self) -> bool:
        """Whether it listens. AssertionError if it has ended."""
        assert self.process.poll() is None, self.log()
        return (self.folder / "run" / "address").exists()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@contextmanager
def coordinator(folder: Path, *options: str) -> Iterator[Coordinator]:
    """Start one with these options of the command line; end it after the block."""
    where = ("--folder", str(folder / "run"), "--listen", "127.0.0.1:0", "--enrolment-port", "0")
    process = commands.start("coordinator", "--preset", "nano", *where, *options, log=folder / "log")
    found = Coordinator(process, folder)
    try:
        wait_until(found.has_started, START_SECONDS, found.log)
        yield found
    finally:
        process.terminate()
        process.wait(30)


async def join_all(run: Coordinator, peers: Iterable[Peer]) -> list[Peer]:
    """Enroll all `peers` and let them join the run."""
    joined = list(peers)
    for peer in joined:
        await peer.enroll(run.invite())
        await peer.join()
    return joined
