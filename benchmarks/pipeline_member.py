"""One member of the pipeline that :mod:`benchmarks.pipeline` measures: a process with the production parts.

It answers commands and ends with its input (benchmarks.processes).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.paced_worker import PACE_VARIABLE, Passes
from benchmarks.processes import answer_commands, credentials_of
from node.core.train.pipeline import Pipeline
from node.ipc.channel import start_child
from node.ipc.worker_calls import BeginRound, Build, Connect
from node.ipc.worker_client import WorkerClient
from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.link_dialer import dial
from node.net.link_server import LinkServer
from protocol.errors import ErrorCode
from protocol.spec.run import RunSpec
from protocol.types import Dialer, Member, PeerId, Plan, Replica, StageRange
from protocol.types import Link as PlannedLink
from protocol.wire.framing import frame_limit

_CONNECT_SECONDS = 30.0


def member_name(position: int) -> PeerId:
    """The peer at `position` of the chain."""
    return PeerId(f"member-{position}")


def replica_of(spec: RunSpec, members: int, k: int, microbatches: int) -> Replica:
    """The chain: equal shares of the stages, links of width `k`."""
    size = spec.swarm.stages // members
    return Replica(
        0,
        tuple(Member(member_name(i), StageRange(i * size, (i + 1) * size), "") for i in range(members)),
        tuple(PlannedLink(k, Dialer.UPSTREAM) for _ in range(members - 1)),
        microbatches=microbatches,
    )


class PipelineMember:
    """The member at one position of the chain. It has one method for each command of the benchmark."""

    _worker: WorkerClient
    _server: LinkServer
    _pipeline: Pipeline

    async def start(
        self, spec: str, position: int, members: int, core: int | None, pace: float, shown: dict[str, str]
    ) -> dict[str, Any]:
        """Start the worker and listen on every address of this namespace."""
        if core is not None:
            os.sched_setaffinity(0, {core})  # the worker inherits it
        self._spec = RunSpec.from_json(spec)
        self._position, self._members = position, members
        self._shown = credentials_of(shown)
        self._server = LinkServer(lambda: self._shown)
        port = await self._server.start("0.0.0.0", 0)
        environment = {
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            PACE_VARIABLE: str(pace),
        }
        child = await start_child(
            "benchmarks.paced_worker", name="worker", died=ErrorCode.WORKER_DIED, environment=environment
        )
        stages = replica_of(self._spec, members, 0, 0).members[position].stages
        self._worker = WorkerClient(child)
        await self._worker.call(Build(self._spec, stages))
        return {"port": port}

    async def connect(self, endpoint: str | None) -> dict[str, Any]:
        """Open the links to both neighbours; the next member is dialled at `endpoint`."""

        def end_at(position: int) -> LinkMember:
            return LinkMember(self._spec.name, self._spec.hash, member_name(position), 0, position)

        here, limits = end_at(self._position), LinkLimits(frame_limit(self._spec), 16)

        async def accept() -> LiveLink | None:
            if self._position == 0:
                return None
            return await self._server.accept(here, end_at(self._position - 1), limits, _CONNECT_SECONDS)

        async def open_() -> LiveLink | None:
            if endpoint is None:
                return None
            next_ = end_at(self._position + 1)
            return await dial(endpoint, here, next_, limits, _CONNECT_SECONDS, self._shown)

        upstream, downstream = await asyncio.gather(accept(), open_())
        replica = replica_of(self._spec, self._members, 0, 0)
        plan = Plan(1, 1, 0, (replica,), "")
        self._pipeline = Pipeline(
            self._spec, plan, replica, self._position, self._worker, upstream, downstream
        )
        return {}

    async def train(self, round_number: int, k: int, steps: int, microbatches: int) -> dict[str, Any]:
        """Take `steps` inner steps. Answers the seconds of each step, and of its passes."""
        spec, last = self._spec, self._members - 1
        replica = replica_of(spec, self._members, k, microbatches)
        self._pipeline.adopt(Plan(round_number, round_number, 0, (replica,), ""), replica)
        await self._worker.call(Connect(k if self._position else None, k if self._position < last else None))
        samples = range(spec.samples_per_round(microbatches))
        await self._worker.call(BeginRound(round_number, samples))
        results = []
        sent = self._pipeline.bytes_sent
        for step in range(steps):
            began, handled = time.monotonic(), time.process_time()
            await self._pipeline.phase(round_number, step, True)
            await self._pipeline.inner_step(round_number, step)
            seconds, handled = time.monotonic() - began, time.process_time() - handled
            passes = await self._worker.call(Passes())
            results.append({"seconds": seconds, "passes": passes, "handled": handled})
        await self._pipeline.phase(round_number, steps, False)
        self._pipeline.drop_frames_before(round_number + 1)
        return {"steps": results, "bytes_sent": self._pipeline.bytes_sent - sent}


def main() -> None:
    try:
        uvloop.run(answer_commands(PipelineMember()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # the benchmark is over, also if a call is running; the worker ends with its socket


if __name__ == "__main__":
    main()
