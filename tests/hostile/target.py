"""The coordinator process that hostile tests attack, and an honest member that is served meanwhile."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil

from coordinator.authority import Authority, open_authority
from node.net.coordinator_channel import ask
from protocol.trust.invite import Invite, decode
from protocol.wire.operator_calls import BanPeer, IssueInvite
from tests.builders import Keyed, keyed
from tests.hostile.honest_member import FILES
from tests.support.coordinator_process import certificate_of, channel_to, operator_of
from tests.support.processes import COORDINATOR, ProcessSwarm

HONEST = keyed(900)
HONEST_SOURCE = "127.0.0.2"
QUIET_CALLS = 20


class Target:
    """A running coordinator: its addresses, its authority, and what an attack does to it."""

    def __init__(self, swarm: ProcessSwarm) -> None:
        self._swarm = swarm
        self.address = (swarm.run / "address").read_text().strip()
        self.enrollment = (swarm.run / "enrolment-address").read_text().strip()
        self.authority: Authority = open_authority(swarm.run, swarm.spec.name)

    @property
    def is_running(self) -> bool:
        return self._swarm.is_running(COORDINATOR)

    @property
    def log(self) -> str:
        return self._swarm.log(COORDINATOR)

    @property
    def resident_mb(self) -> float:
        """Memory of the coordinator's main process."""
        pid = self._swarm.started[COORDINATOR].process.pid
        return float(psutil.Process(pid).memory_info().rss) / 1e6

    @property
    def folder(self) -> Path:
        return self._swarm.run

    def member(self, who: Keyed, address: str | None = None) -> grpc.aio.Channel:
        return channel_to(address or self.address, self.authority.pem, certificate_of(self.authority, who))

    def newcomer(self, address: str | None = None) -> grpc.aio.Channel:
        return channel_to(address or self.enrollment, self.authority.pem, None)

    async def ban(self, who: Keyed) -> None:
        async with channel_to(self.address, self.authority.pem, operator_of(self.folder)) as channel:
            await ask(channel, BanPeer(who.peer, "hostile"), 60.0)

    async def invite(self, uses: int) -> Invite:
        async with channel_to(self.address, self.authority.pem, operator_of(self.folder)) as channel:
            return decode((await ask(channel, IssueInvite(uses, 3600.0), 60.0)).invite)

    @asynccontextmanager
    async def honest(self) -> AsyncIterator[HonestMember]:
        """A member at another source, in a process of its own, which calls until the end of the block.

        The block begins when it has been served a few times.
        """
        folder = self.folder.parent / "honest"
        folder.mkdir(mode=0o700, exist_ok=True)
        contents = self.authority.pem, *certificate_of(self.authority, HONEST)
        for name, content in zip(FILES, contents, strict=True):
            (folder / name).write_bytes(content)
        command = ("-m", "tests.hostile.honest_member", self.address, HONEST_SOURCE, str(folder))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        member = HonestMember(process)
        reading = asyncio.create_task(member.read())
        try:
            await member.has_quiet_calls.wait()
            yield member
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await reading
            assert await process.wait() == 0


class HonestMember:
    """What tests.hostile.honest_member tells of its calls.

    Attributes:
        quiet: seconds of its first calls, before the attack.
        seconds: of the later ones.
        failures: calls that have failed, with the reason.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.quiet: list[float] = []
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self.has_quiet_calls = asyncio.Event()

    async def read(self) -> None:
        """Read its calls until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            call = json.loads(line)
            if "failure" in call:
                self.failures.append(call["failure"])
            else:
                (self.seconds if self.has_quiet_calls.is_set() else self.quiet).append(call["seconds"])
            if len(self.quiet) == QUIET_CALLS:
                self.has_quiet_calls.set()
        self.has_quiet_calls.set()  # an early end is no reason to wait

    @property
    def latencies(self) -> str:
        """For people."""
        return (
            f"honest member: {_quantiles(self.quiet)} before; {_quantiles(self.seconds)} in the attack; "
            f"{len(self.failures)} failed"
        )


def _quantiles(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"{len(seconds)} calls"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return (
        f"{len(seconds)} calls, median {1e3 * cuts[49]:.0f} ms, p99 {1e3 * cuts[98]:.0f} ms, "
        f"most {1e3 * max(seconds):.0f} ms"
    )
