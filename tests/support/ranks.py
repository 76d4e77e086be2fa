"""A full replica that a test trains round by round, in one process or over several ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from node.checkpoint.layout import round_folder
from node.core.train.pipeline import Pipeline
from node.ipc.stored_payload import StoredPayload, sha256_of
from node.ipc.worker_calls import (
    Abandon,
    Abort,
    BeginRound,
    Build,
    Commit,
    CommitResult,
    ComputeOptions,
    Connect,
    Digests,
    EndInnerPhase,
    LocalData,
    Propose,
    Restore,
    WriteCheckpoint,
)
from node.ipc.worker_client import WorkerClient
from protocol.spec.run import RunSpec
from protocol.types import Part, Plan, StageRange
from tests.support.running_replica import replica_of, spec_of

SPEC = spec_of(
    **{
        "link.k": 0,
        "link.dtype": "bf16",
        "model.layers": 2,
        "swarm.stages": 2,
        "inner.microbatches": 3,
        "inner.steps": 2,
        "outer.optimizer": "nesterov",
        "outer.merge": "radial",
        "outer.overlap": 1,
    }
)
"""Of three microbatches two ranks get two and one. Momentum is committed with the parameters.

Where training continues beyond a proposal, all ranks start from the estimates of the owners.
"""


@dataclass(frozen=True)
class Trained:
    """The figures of one inner phase and the validation after it."""

    loss: float
    norm: float
    validation: float


class FullReplica:
    """A full replica of `spec` behind `worker`."""

    def __init__(self, worker: WorkerClient, spec: RunSpec = SPEC) -> None:
        self.worker, self._spec = worker, spec
        replica = replica_of(spec, 1)
        self._pipeline = Pipeline(spec, Plan(1, 1, 0, (replica,), "test"), replica, 0, worker, None, None)
        self.stages = StageRange(0, spec.swarm.stages)

    async def build(self, sharded: bool | None = None) -> None:
        await self.worker.call(Build(self._spec, self.stages, LocalData(ComputeOptions(sharded=sharded))))
        await self.worker.call(Connect(None, None))

    async def train(self, round_number: int) -> Trained:
        """The inner phase of a round, and the validation."""
        await self.take_steps(round_number)
        report = await self.worker.call(EndInnerPhase())
        validation = await self._pipeline.validate(round_number)
        return Trained(report.result.loss, report.result.gradient_norm, validation)

    async def take_steps(self, round_number: int) -> None:
        """The inner steps of a round."""
        first = (round_number - 1) * self._spec.samples_per_round()
        await self.worker.call(BeginRound(round_number, range(first, first + self._spec.samples_per_round())))
        for step in range(self._spec.inner.steps):
            await self._pipeline.inner_step(round_number, step)

    async def cancel_a_step(self) -> None:
        """Begin a round, cancel it in its first step, and drop that."""
        await self.worker.call(BeginRound(1, range(self._spec.samples_per_round())))
        step = asyncio.create_task(self._pipeline.inner_step(1, 0))
        await asyncio.sleep(0)  # its first operations are queued
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await self.worker.call(Abandon())

    async def propose(self) -> dict[int, bytes]:
        """The payload of each stage."""
        payloads = {stage: await self.worker.call(Propose(stage)) for stage in self.stages}
        return {stage: payload for stage, payload in payloads.items() if payload is not None}

    async def commit(
        self, round_number: int, payloads: Mapping[int, tuple[bytes, ...]], mine_included: bool = True
    ) -> list[CommitResult]:
        """Commit the payloads of each stage, all with weight 1."""
        return [
            await self.worker.call(
                Commit(
                    stage,
                    round_number,
                    tuple(StoredPayload(sha256_of(payload), data=payload) for payload in each),
                    (1.0,) * len(each),
                    0 if mine_included else None,
                )
            )
            for stage, each in payloads.items()
        ]

    async def abort(self, round_number: int) -> None:
        for stage in self.stages:
            await self.worker.call(Abort(stage, round_number))

    async def digests(self) -> Mapping[tuple[int, Part], tuple[int, str]]:
        return await self.worker.call(Digests())

    async def write(self, folder: Path, round_number: int) -> None:
        await self.worker.call(WriteCheckpoint(folder / round_folder(round_number), round_number))

    async def restore(self, folder: Path) -> None:
        found = await self.worker.call(Restore(folder))
        assert found is not None
        assert found.has_private_state
