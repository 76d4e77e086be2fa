"""A process of benchmarks.coordinator: the coordinator of a run, without a DHT."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.processes import answer_commands
from coordinator import app
from coordinator.api.public_ports import ListenAddresses
from protocol.group.peers import PeerRecord
from protocol.server.busy_process import prepare_process
from protocol.spec.run import RunSpec
from protocol.types import PeerId
from tests.builders import keyed
from tests.support.dial_back import believe

_KEY = 1_000_000
"""The number of the coordinator's key, which no peer has."""


class _NoDht:
    arbiter = None
    addresses = ("/ip4/127.0.0.1/tcp/1/p2p/bootstrap",)

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId],
        sources: Collection[str],
        members: Collection[PeerId],
    ) -> None:
        pass

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        pass

    async def close(self) -> None:
        pass


class LoadedCoordinator:
    """The commands of the benchmark."""

    def __init__(self) -> None:
        self._serving: asyncio.Task[bool]

    async def start(self, spec_json: str, folder: str) -> dict[str, Any]:
        """Serve a run in `folder`; returns the address of the API."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def start_bootstrap(run: str) -> _NoDht:
            return _NoDht()

        self._serving = asyncio.create_task(
            app.run_coordinator(
                RunSpec.from_json(spec_json),
                Path(folder),
                ListenAddresses("127.0.0.1:0", enrollment="127.0.0.1:0"),
                keyed(_KEY),
                start_bootstrap,
                lambda run, api, enrollment: ready.set_result(api),
                dial_back=believe,
            )
        )
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()
        return {"address": ready.result()}

    async def figures(self) -> dict[str, float]:
        """CPU seconds of this process so far, and the most memory that it has had, in bytes."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Not `ru_maxrss`: that contains what the benchmark itself had when it started this process.
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {"cpu": used.ru_utime + used.ru_stime, "memory": 1024 * int(fields["VmHWM"].split()[0])}

    async def until_over(self) -> dict[str, Any]:
        await self._serving
        return {}


async def _main() -> None:
    prepare_process()  # as the command does
    await answer_commands(LoadedCoordinator())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the command does
        runner.run(_main())
