"""One node's training from its first plan to the last round: read :meth:`Training.run` top to bottom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.identity import Identity
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.hive.client import Hivemind
from node.net.ipc import Child
from node.net.link import Link, LinkLimits, LinkServer, Place, dial
from node.net.membership import Membership
from node.train.exchange import OuterExchange
from node.train.pipeline import Pipeline
from protocol.errors import ErrorCode, HetnodeError
from protocol.framing import frame_limit
from protocol.pb import hetnode_pb2 as pb
from protocol.samples import sample_range
from protocol.spec import RunSpec
from protocol.types import Dialer, Plan, Replica

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What a joined node has at hand: its identity, its processes and its connections."""

    identity: Identity
    worker: Child
    hivemind: Hivemind
    coordinator: CoordinatorClient
    links: LinkServer
    membership: Membership
    directory: Directory


@dataclass(frozen=True)
class LocalData:
    """Where this machine computes and finds what the spec names: None means as the spec says."""

    device: str
    source: str | None
    tokenizer: str | None


@dataclass(frozen=True)
class Seat:
    """Where the plan puts this node."""

    plan: Plan
    replica: Replica
    position: int

    @property
    def is_last(self) -> bool:
        return self.position == len(self.replica.members) - 1


@dataclass(frozen=True)
class Built:
    """What the worker says of the stages that it has built, by stage.

    `embedding_payload_bytes` is the length of stage 0's payloads, which every member applies.
    """

    codecs: Mapping[int, str]
    digests: Mapping[int, str]
    payload_bytes: Mapping[int, int]
    embedding_payload_bytes: int
    parameters: Mapping[int, int]


class Training:
    """Trains this node's stages until the run's last round.

    Args:
        spec: the run.
        services: what the node has at hand.
        local: what this machine has its own way to.
        folder: where the checkpoint goes.
    """

    def __init__(self, spec: RunSpec, services: Services, local: LocalData, folder: Path) -> None:
        self._spec, self._services = spec, services
        self._local, self._folder = local, folder

    async def run(self) -> Path:
        """Wait for a plan, train all rounds, write the checkpoint. Returns the checkpoint's folder.

        Raises HetnodeError for every expected failure; what was committed before stays committed.
        """
        spec, services = self._spec, self._services
        seat = self._seat_in(await services.membership.plan())
        stages = seat.replica.members[seat.position].stages
        log.info("%s: %s, stages %s", seat.plan.reason, seat.replica.name, stages)
        built = await self._build(seat)
        await services.hivemind.host_stages(built.payload_bytes)
        await services.directory.take_stages(stages)
        exchange = OuterExchange(
            spec,
            stages,
            services.identity,
            services.worker,
            services.hivemind,
            services.coordinator,
            built.codecs,
            built.digests,
            {0: built.embedding_payload_bytes, **built.payload_bytes},
        )
        async with AsyncExitStack() as stack:
            upstream, downstream = await self._open_links(seat, stack)
            pipeline = Pipeline(
                spec, seat.plan, seat.replica, seat.position, services.worker, upstream, downstream
            )
            await self._measure(seat, 0, {"validation_loss": await pipeline.validate(0)})
            for round_ in range(1, spec.rounds + 1):
                measured = await self._inner_phase(seat, round_, pipeline)
                began = asyncio.get_running_loop().time()
                outcome = await exchange.run(seat.plan, round_)
                measured["outer_seconds"] = asyncio.get_running_loop().time() - began
                measured["payload_bytes"] = outcome.payload_bytes
                measured["payload_bytes_dense"] = 4 * sum(built.parameters.values())
                await pipeline.forget_before(round_)
                measured["validation_loss"] = await pipeline.validate(round_)
                await self._measure(seat, round_, measured)
                if round_ < spec.rounds and outcome.next_epoch != seat.plan.epoch:
                    seat = self._seat_in(await services.membership.plan(outcome.next_epoch))
                    log.info("%s", seat.plan.reason)
                    pipeline.adopt(seat.plan)
            await pipeline.part()
        folder = self._folder / f"round-{spec.rounds:06d}"
        await services.worker.call("write_checkpoint", {"folder": str(folder), "round": spec.rounds})
        return folder

    async def _build(self, seat: Seat) -> Built:
        """Have the worker create its stages and links."""
        replica, position = seat.replica, seat.position
        stages = replica.members[position].stages
        links = replica.links
        reply = await self._services.worker.call(
            "build",
            {
                "spec": self._spec.canonical_json,
                "stages": [stages.first, stages.stop],
                **asdict(self._local),
                "k_upstream": links[position - 1].k if position > 0 else None,
                "k_downstream": None if seat.is_last else links[position].k,
            },
        )

        def by_stage(name: str) -> dict[int, Any]:
            return dict(zip(stages, reply.body[name], strict=True))

        return Built(
            by_stage("codecs"),
            by_stage("digests"),
            by_stage("payload_bytes"),
            reply.body["embedding_payload_bytes"],
            by_stage("parameters"),
        )

    async def _inner_phase(self, seat: Seat, round_: int, pipeline: Pipeline) -> dict[str, Any]:
        """H inner steps. Returns what was measured."""
        spec, worker = self._spec, self._services.worker
        clock = asyncio.get_running_loop().time
        samples = sample_range(seat.plan, spec.samples_per_round, round_, seat.replica.index)
        await worker.call("begin_round", {"round": round_, "samples": [samples.start, samples.stop]})
        began, sent_before = clock(), pipeline.bytes_sent
        for step in range(spec.inner.steps):
            self._services.membership.progress = (round_, step)
            await pipeline.inner_step(round_, step)
        self._services.membership.progress = (round_, spec.inner.steps)
        result = (await worker.call("end_inner_phase", {})).body
        if result["skipped_steps"]:
            log.warning(
                "round %d: %d steps had gradients that are not finite", round_, result["skipped_steps"]
            )
        return {
            "train_loss": result["loss"],
            "tokens": result["tokens"],
            "gradient_norm": result["gradient_norm"],
            "inner_seconds": clock() - began,
            "link_bytes_sent": pipeline.bytes_sent - sent_before,
            "link_bytes_dense": pipeline.dense_bytes_per_round,
        }

    async def _measure(self, seat: Seat, round_: int, values: Mapping[str, Any]) -> None:
        measurement = pb.Measurement(
            round=round_,
            replica=seat.replica.index,
            position=seat.position,
            complete=seat.is_last,
            **values,
        )
        try:
            await self._services.coordinator.measure(measurement)
        except HetnodeError as error:
            if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                raise
            log.warning("a measurement of round %d is lost: %s", round_, error)  # no reason to stop training
        if seat.is_last:
            log.info(
                "round %d of %d: validation loss %.4f", round_, self._spec.rounds, values["validation_loss"]
            )

    def _seat_in(self, plan: Plan) -> Seat:
        peer = self._services.identity.peer
        replica = plan.replica_of(peer)
        if replica is None and plan.epoch == 1:
            raise HetnodeError(
                ErrorCode.RUN_FULL,
                "The run has started with other peers and needs no further one.",
                "Join another run.",
            )
        if replica is None:
            raise HetnodeError(
                ErrorCode.NEIGHBOUR_LOST,
                f"This node has no place from round {plan.from_round} on: the run {plan.reason}.",
                "A member of its replica is gone; the other replicas go on without it.",
            )
        return Seat(plan, replica, replica.position_of(peer))

    async def _open_links(self, seat: Seat, stack: AsyncExitStack) -> tuple[Link | None, Link | None]:
        """Open the links to both neighbours at the same time; `stack` closes them."""
        spec, members = self._spec, seat.replica.members
        endpoints = await self._services.directory.endpoints() if len(members) > 1 else {}
        # The first member may have a corpus to tokenize before it comes to its links.
        seconds = spec.timing.link + spec.timing.match_window
        limits = LinkLimits(frame_limit(spec), 2 * spec.inner.microbatches + 4)

        def place(position: int) -> Place:
            peer = members[position].peer
            return Place(spec.run_id, spec.hash, peer, seat.replica.index, position)

        async def connect(other: int) -> Link | None:
            if not 0 <= other < len(members):
                return None
            here, there = place(seat.position), place(other)
            upstream_dials = seat.replica.links[min(seat.position, other)].dialer is Dialer.UPSTREAM
            if upstream_dials == (seat.position < other):
                endpoint = endpoints.get(there.peer) or members[other].endpoint
                shown = self._services.coordinator.credentials.tls
                link = await dial(endpoint, here, there, limits, seconds, shown)
            else:
                link = await self._services.links.accept(here, there, limits, seconds)
            stack.push_async_callback(link.close)
            ends = asyncio.create_task(self._close_when_banned(link), name=f"bans-{other}")
            stack.callback(ends.cancel)
            log.info("link to position %d of %s is open", other, seat.replica.name)
            return link

        upstream, downstream = await asyncio.gather(connect(seat.position - 1), connect(seat.position + 1))
        return upstream, downstream

    async def _close_when_banned(self, link: Link) -> None:
        await link.close(await self._services.membership.banned(link.neighbour.peer))
