"""A replica whose members run the production worker in threads of this process, over real gRPC links.

:func:`plain_loop` is what it must equal: one process without members, links or outer rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch

from node.core.model.stage import Stage
from node.core.optimizer.adamw import AdamW
from node.core.optimizer.schedule import learning_rate
from node.core.train.pipeline import Pipeline
from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from node.ipc.worker_calls import BeginRound, Build, Connect, EndInnerPhase
from node.ipc.worker_client import WorkerClient
from node.net.link import LinkLimits, LinkMember
from node.net.link_dialer import dial
from node.net.link_server import LinkServer
from node.security.credentials import Credentials
from node.worker.process import NodeWorker
from protocol.run_files.resolve import resolve
from protocol.spec.fixed import BETAS, EPSILON
from protocol.spec.run import RunSpec
from protocol.types import Dialer, Link, Member, PeerId, Plan, Replica, StageRange
from protocol.wire.framing import frame_limit
from protocol.wire.typed_calls import Call, Reply
from tests.support.certificates import credentials
from tests.support.float_links import FLOAT32


def _same(shown: Credentials) -> Credentials:
    return shown


class ThreadWorker:
    """The production worker in a thread instead of a process, and the client of its calls."""

    def __init__(self) -> None:
        self._worker = NodeWorker()
        self._handlers = self._worker.handlers()
        self._pool = ThreadPoolExecutor(1)
        self.client = WorkerClient(self)

    @property
    def trainer(self) -> Trainer:
        return self._worker.trainer

    def call(self, call: Call) -> Awaitable[Reply]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._pool, self._handlers[call.method], call)

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


def spec_of(**overrides: Any) -> RunSpec:
    settings = {"model.layers": 4, "swarm.stages": 4, "link.dtype": FLOAT32, "inner.microbatches": 4}
    return resolve("nano", overrides={**settings, **overrides})


def replica_of(spec: RunSpec, members: int, index: int = 0) -> Replica:
    size = spec.swarm.stages // members
    return Replica(
        index,
        tuple(
            Member(PeerId(f"peer-{index}-{i}"), StageRange(i * size, (i + 1) * size), "")
            for i in range(members)
        ),
        tuple(Link(spec.link.k, Dialer.UPSTREAM) for _ in range(members - 1)),
    )


def with_k(replica: Replica, k: int) -> Replica:
    return replace(replica, links=tuple(replace(link, k=k) for link in replica.links))


class RunningReplica:
    """All members of one replica, connected; they train in step. `k` of its links, if not the spec's."""

    def __init__(self, spec: RunSpec, members: int, index: int = 0, k: int | None = None) -> None:
        self.spec = spec
        self.replica = replica_of(spec, members, index)
        if k is not None:
            self.replica = with_k(self.replica, k)
        self.plan = Plan(1, 1, 0, (self.replica,), "test")
        self.workers = [ThreadWorker() for _ in self.replica.members]
        self.pipelines: list[Pipeline] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for worker, member in zip(self.workers, self.replica.members, strict=True):
            await worker.client.call(Build(self.spec, member.stages))
        await self.connect()
        limits = LinkLimits(frame_limit(self.spec), 12)
        places = [
            LinkMember(self.spec.name, self.spec.hash, member.peer, self.replica.index, position)
            for position, member in enumerate(self.replica.members)
        ]
        upstream: list[Any] = [None]
        downstream: list[Any] = []
        for upper, lower in pairwise(places):
            shown = credentials(lower.peer)
            server = LinkServer(partial(_same, shown))
            port = await server.start("127.0.0.1", 0)
            stack.push_async_callback(server.close)
            above, below = await asyncio.gather(
                dial(f"127.0.0.1:{port}", upper, lower, limits, 10, credentials(upper.peer)),
                server.accept(lower, upper, limits, 10),
            )
            stack.push_async_callback(above.close)
            stack.push_async_callback(below.close)
            downstream.append(above)
            upstream.append(below)
        downstream.append(None)
        self.upstream = upstream
        self.pipelines = [
            Pipeline(self.spec, self.plan, self.replica, i, worker.client, upstream[i], downstream[i])
            for i, worker in enumerate(self.workers)
        ]

    async def connect(self) -> None:
        """Tell all workers how wide the links are."""
        ks = [None, *(link.k for link in self.replica.links), None]
        for worker, (k_upstream, k_downstream) in zip(self.workers, pairwise(ks), strict=True):
            await worker.client.call(Connect(k_upstream, k_downstream))

    async def adopt(self, replica: Replica, epoch: int) -> None:
        """Go on under a later plan, with the same links."""
        self.replica, self.plan = replica, Plan(epoch, 1, 0, (replica,), "test")
        await self.connect()
        for pipeline in self.pipelines:
            pipeline.adopt(self.plan, replica)

    async def inner_phase(self, round_number: int, first_sample: int) -> float:
        """Train one round; returns the mean training loss."""
        microbatches = self.spec.microbatches_of(self.replica)
        samples = range(first_sample, first_sample + self.spec.samples_per_round(microbatches))

        async def member(pipeline: Pipeline, worker: ThreadWorker) -> float:
            await worker.client.call(BeginRound(round_number, samples))
            for step in count():
                if not await pipeline.phase(round_number, step, step < self.spec.inner.steps):
                    break
                await pipeline.inner_step(round_number, step)
            return (await worker.client.call(EndInnerPhase())).result.loss

        losses = await asyncio.gather(*map(member, self.pipelines, self.workers))
        return losses[-1]

    async def validate(self, round_number: int) -> float:
        return (await asyncio.gather(*(pipeline.validate(round_number) for pipeline in self.pipelines)))[-1]

    def trainer_of(self, stage: int) -> Trainer:
        return next(worker.trainer for worker in self.workers if stage in worker.trainer.stages)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach()
            for worker in self.workers
            for module in worker.trainer.modules.values()
            for name, parameter in module.canonical_parameters().items()
        }

    def commit(
        self, stage: int, round_number: int, payloads: list[tuple[bytes, float]], mine_included: bool = True
    ) -> str:
        digest = self.trainer_of(stage).commit(stage, round_number, payloads, mine_included)
        if stage == 0:
            for worker in self.workers:
                if 0 not in worker.trainer.stages:
                    worker.trainer.commit_embedding(round_number, payloads)
        return digest


def plain_loop(spec: RunSpec, rounds: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A single process without members, links or outer rounds: the loop that everything must equal."""
    stream = open_stream(spec)
    stages = [Stage(spec, stage) for stage in range(spec.swarm.stages)]
    named = {name: p for stage in stages for name, p in stage.canonical_parameters().items()}
    optimizer = plain_optimizer(spec, named)
    losses = []
    for step in range(rounds * spec.inner.steps):
        total = 0.0
        for microbatch in range(spec.inner.microbatches):
            first = (
                step * spec.samples_per_round() // spec.inner.steps + microbatch * spec.inner.microbatch_size
            )
            tokens = torch.from_numpy(stream.read(range(first, first + spec.inner.microbatch_size))).long()
            x = tokens[:, :-1]
            for stage in stages[:-1]:
                x = stage(x)
            # The loss of a replica too: AdamW enlarges the last bits of gradients near 0.
            loss = stages[-1](x, tokens[:, 1:])
            (loss / spec.inner.microbatches).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(list(named.values()), spec.inner.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec.inner, step, spec.total_steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / spec.inner.microbatches)
    return losses, {name: parameter.detach() for name, parameter in named.items()}


def plain_optimizer(spec: RunSpec, named: Mapping[str, torch.Tensor]) -> AdamW:
    """AdamW for parameters with these names, of which matrices but the embedding decay."""
    decays = {name: p.dim() == 2 and name != "emb" for name, p in named.items()}
    groups = [
        {"params": [(name, p) for name, p in named.items() if decays[name] is each], "weight_decay": decay}
        for each, decay in ((True, spec.inner.weight_decay), (False, 0))
    ]
    return AdamW(groups, lr=spec.inner.learning_rate, betas=BETAS, eps=EPSILON)
