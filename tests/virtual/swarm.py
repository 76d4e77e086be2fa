"""Whole swarms on a virtual clock: :func:`play` a scenario with production nodes and coordinator."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors import safe_open

from coordinator.state.events import AnchorDiverged, Event, RoundAborted, RoundCommitted
from coordinator.state.state import State
from coordinator.status.messages import run_message
from node import hooks
from node.runtime import NodeOptions, run_node
from node.security.credentials import RunCredentials, folder_of
from node.security.identity import Identity
from node.worker.trainer import Trainer
from protocol.algorithm.topk import SparseTensor
from protocol.errors import ExitCode, HetnodeError, first_error
from protocol.spec.run import RunSpec
from protocol.trust.tls import peer_uri
from protocol.types import Capacity, Decision, PeerId, Role
from protocol.wire.payload_codec import PayloadLayout, decode
from tests.support.certificates import credentials
from tests.support.fault_hooks import FaultHooks, checkpoint_faults
from tests.support.fault_script import Script
from tests.support.faults import FaultPlan
from tests.virtual.coordinator import ADDRESS, OWNER, VirtualCoordinator
from tests.virtual.hive import Dht, VirtualTransport
from tests.virtual.loop import Life, VirtualLoop, run, start
from tests.virtual.network import Network, here
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.worker import VirtualWorker

log = logging.getLogger(__name__)
T = TypeVar("T")

SUPERVISOR_SECONDS = 5.0


@dataclass
class VirtualNode:
    """A node's machine: its disk outlives the lives of the node.

    `speed` is that of its device, 1 being usual. `errors` are those with which its lives have ended.
    """

    name: str
    role: Role
    folder: Path
    identity: Identity
    speed: float = 1.0
    life: Life | None = None
    task: asyncio.Task[Path] | None = None
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    worker: VirtualWorker | None = None
    errors: list[HetnodeError] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done() and not (self.life and self.life.is_over)

    @property
    def has_finished(self) -> bool:
        """Whether it was there at the end of the run."""
        return self.task is not None and self.task.done() and self.task.exception() is None


class VirtualSwarm:
    """A coordinator and nodes on one virtual network. Create it with :func:`play`.

    Attributes:
        events: of the coordinator, over all its lives.
        is_supervised: nodes that end because they reach nobody are started again, as a supervisor would do.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        members: Mapping[str, Role],
        plan: FaultPlan,
        seed: int,
        step_seconds: float,
    ) -> None:
        self.spec, self.folder, self.plan = spec, folder, plan
        self._step_seconds = step_seconds
        self.network = Network(random.Random(seed))
        self.rpc = VirtualGrpc(self.network)
        self.dht = Dht()
        self.events: list[Event] = []
        self.is_supervised = False
        self._to_come: set[str] = set()
        self._broken: BaseException | None = None
        self._watchers: list[tuple[Callable[[State], bool], asyncio.Future[None]]] = []
        self.coordinator = VirtualCoordinator(spec, folder / "coordinator", self.rpc, self._observe)
        self.nodes = {name: self._machine(name, role) for name, role in members.items()}

    @property
    def state(self) -> State:
        return self.coordinator.state

    @property
    def loop(self) -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop

    def peer(self, name: str) -> PeerId:
        return self.nodes[name].identity.peer

    def start(self, *names: str) -> None:
        """Start the nodes `names`, or all of them."""
        for name in names or self.nodes:
            node = self.nodes[name]
            assert not node.is_running, name
            node.life, node.leaving = Life(name), asyncio.Event()
            script = Script(
                self.plan.faults_of(name), self.plan.report_of(name), VirtualHands(self, name), self.loop.time
            )
            self.plan.folder.mkdir(parents=True, exist_ok=True)
            node.life.context.run(hooks.install, FaultHooks(script))
            node.task = start(node.life, self._node(node), name=name)
            node.task.add_done_callback(partial(self._has_ended, name))

    def kill(self, *names: str) -> None:
        """SIGKILL: nothing of these nodes runs any more, their disks stay."""
        for name in names:
            life = self.nodes[name].life
            assert life is not None
            self.loop.end(life)
            self.rpc.has_died(life)

    def trainer(self, name: str) -> Trainer:
        """What the node's worker, in its newest life, has built."""
        worker = self.nodes[name].worker
        assert worker is not None
        return worker.worker.trainer

    def damage_anchor(self, name: str, stage: int) -> None:
        """Flip one bit of an anchor in the node's worker, as broken memory would."""
        anchor = next(iter(self.trainer(name).outer[stage].anchor.values()))
        anchor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    def drain(self, *names: str) -> None:
        """Ask these nodes to leave, as the first SIGTERM does."""
        for name in names:
            self.nodes[name].leaving.set()

    def start_later(self, name: str, seconds: float) -> None:
        """Start the node again after so many seconds."""

        async def restart() -> None:
            await asyncio.sleep(seconds)
            self._to_come.discard(name)
            self.start(name)

        self._to_come.add(name)

        start(Life("test"), restart())

    def suspend(self, name: str, seconds: float | None = None) -> None:
        """SIGSTOP, for `seconds` or until :meth:`resume`."""
        life = self.nodes[name].life
        assert life is not None
        self.loop.suspend(life)
        self.network.is_silent(life)
        if seconds is not None:
            start(Life("test"), self._resume_after(life, seconds))

    def resume(self, name: str) -> None:
        life = self.nodes[name].life
        assert life is not None
        self.loop.resume(life)

    async def until(
        self, condition: Callable[[State], bool], what: str = "", seconds: float = 3600.0
    ) -> None:
        """Wait until the coordinator's state is so. AssertionError after `seconds`."""
        if self._broken is not None:
            raise self._broken
        if condition(self.state):
            return
        reached = self.loop.create_future()
        self._watchers.append((condition, reached))
        try:
            async with asyncio.timeout(seconds):
                await reached
        except TimeoutError:
            why = run_message(self.state, self.spec)
            raise AssertionError(f"not within {seconds:.0f} s: {what}; {why} {self.loop.where()}") from None

    async def until_round(self, number: int, seconds: float = 3600.0) -> None:
        """Wait until round `number` is the one that is open."""
        await self.until(lambda state: state.current_round >= number, f"round {number}", seconds)

    async def until_fired(self, name: str, count: int = 1, seconds: float = 3600.0) -> None:
        """Wait until `count` planned faults have struck the node."""
        async with asyncio.timeout(seconds):
            while len(self.plan.fired(name)) < count:  # noqa: ASYNC110  the report is a file
                await asyncio.sleep(0.05)

    async def until_over(self, *names: str, seconds: float = 86_400.0) -> None:
        """Wait until the nodes `names`, or all that run, have ended; raise what ended them."""
        nodes = [
            node for node in self.nodes.values() if node.name in names or (not names and node.is_running)
        ]
        tasks = [node.task for node in nodes if node.task is not None]
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(asyncio.shield(task) for task in tasks))
        except TimeoutError:
            raise AssertionError(f"not over within {seconds:.0f} s {self.loop.where()}") from None

    async def until_all_over(self, but: str = "", seconds: float = 86_400.0) -> None:
        """Wait until all nodes have ended well, those included that are to be started again.

        Args:
            but: words of an error with which they may end as well.
        """
        async with asyncio.timeout(seconds):
            for node in self.nodes.values():
                while node.name in self._to_come or node.is_running:  # noqa: ASYNC110  a task that is yet to be
                    await asyncio.sleep(1.0)
                error = node.task.exception() if node.task else None
                if error is not None and (not but or but not in str(error)):
                    raise error

    @property
    def decisions(self) -> list[Decision]:
        return [event.decision for event in self.events if isinstance(event, RoundCommitted | RoundAborted)]

    def committed(self, stage: int = 0) -> list[int]:
        return [each.round_number for each in self.decisions if each.committed and each.stage == stage]

    def diverged(self) -> list[AnchorDiverged]:
        return [event for event in self.events if isinstance(event, AnchorDiverged)]

    def anchors(self, name: str) -> dict[int, str]:
        """sha-256 of the tensors in the checkpoint with which the node has ended, by stage."""
        task = self.nodes[name].task
        assert task is not None
        folder = task.result()
        return {int(path.stem[6:]): digest_of(path) for path in folder.glob("stage-*.safetensors")}

    def assert_all_agree(self, *names: str) -> None:
        """One decision per (stage, round), all rounds decided, and equal final anchors on all nodes."""
        keys = [(each.stage, each.round_number) for each in self.decisions]
        assert len(keys) == len(set(keys)), "a round was decided twice"
        assert len(keys) == self.spec.rounds * self.spec.swarm.stages
        found: dict[int, dict[str, str]] = {}
        for name in names or self.nodes:
            anchors = self.anchors(name)
            assert anchors, f"{name} has no final checkpoint"
            for stage, digest in anchors.items():
                found.setdefault(stage, {})[name] = digest
        assert set(found) == set(range(self.spec.swarm.stages))
        for stage, digests in found.items():
            assert len(set(digests.values())) == 1, f"stage {stage} differs: {digests}"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Nodes get the stand-ins of this swarm meanwhile."""

        async def start_child(*_: Any, **__: Any) -> VirtualWorker:
            return self._worker()

        class Hive:
            start = staticmethod(self.start_transport)

        with (
            self.rpc.installed(),
            patch(
                "os.fsync", lambda descriptor: None
            ),  # a machine of this swarm never loses its disk's cache
            # SIGKILL gives a lock back; here it is the same process that goes on.
            patch("node.runtime.lock_folder", lambda folder: nullcontext()),
            patch("node.runtime.measure_capacity", lambda device, threads: Capacity(device, 2**30, threads)),
            patch("node.net.link.clock", self.loop.time),
            patch("node.runtime.start_child", start_child),
            patch("node.runtime.HivemindTransport", Hive),
            checkpoint_faults(),
            patch("node.optimizer.outer_stage.decode", remembered_decode()),
        ):
            yield

    async def _node(self, node: VirtualNode) -> Path:
        options = NodeOptions(
            invite=None, run=self.spec.run_id, role=node.role, folder=node.folder, advertise=node.name
        )
        try:
            return await run_node(options, node.identity, node.leaving)
        except (HetnodeError, BaseExceptionGroup) as error:
            first = first_error(error)
            if isinstance(first, HetnodeError):
                node.errors.append(first)
                raise first from None
            raise

    def _worker(self) -> VirtualWorker:
        node = self._node_here()
        # One inner step takes `step_seconds` on a usual device, however its microbatches overlap.
        usual = self.spec.inner.microbatches
        node.worker = VirtualWorker(self._step_seconds / node.speed / usual)
        return node.worker

    async def start_transport(
        self, *, identity: Identity, run: str, client_mode: bool, **_: Any
    ) -> VirtualTransport:
        return VirtualTransport(self.rpc, self.dht, identity, run, client_mode)

    def _node_here(self) -> VirtualNode:
        return self.nodes[here()]

    def _machine(self, name: str, role: Role) -> VirtualNode:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
        identity = Identity(folder / "identity.key", key, lock=-1)
        RunCredentials(
            folder_of(identity.path, self.spec.run_id),
            self.spec.run_id,
            ADDRESS,
            OWNER.peer,
            None,
            credentials(identity.peer, self.coordinator.authority),
        ).save()
        self.rpc.knows(name, peer_uri(identity.peer))
        return VirtualNode(name, role, folder, identity)

    def _observe(self, event: Event, state: State) -> None:
        self.events.append(event)
        for condition, reached in list(self._watchers):
            if not reached.done() and condition(state):
                reached.set_result(None)
        self._watchers = [(c, reached) for c, reached in self._watchers if not reached.done()]

    def _has_ended(self, name: str, task: asyncio.Task[Path]) -> None:
        """An end that no person could be told in a sentence is a bug, and ends the scenario."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, HetnodeError):
            if self.is_supervised and error.code.exit_code is ExitCode.NETWORK:
                self.start_later(name, SUPERVISOR_SECONDS)
        elif error is not None:
            self._broken = error
            for _, reached in self._watchers:
                if not reached.done():
                    reached.set_exception(error)

    async def _resume_after(self, life: Life, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not life.is_over:
            self.loop.resume(life)


class VirtualHands:
    """Strikes the node `name` of a virtual swarm."""

    def __init__(self, swarm: VirtualSwarm, name: str) -> None:
        self._swarm, self._name = swarm, name

    def kill(self) -> None:
        self._swarm.kill(self._name)

    def stop(self, seconds: float) -> None:
        self._swarm.suspend(self._name, seconds)

    def pause(self, seconds: float) -> None:
        self._swarm.suspend(self._name, seconds)


def play(
    scenario: Callable[[VirtualSwarm], Awaitable[T]],
    spec: RunSpec,
    folder: Path,
    members: Mapping[str, Role],
    *,
    plan: FaultPlan | None = None,
    seed: int = 0,
    step_seconds: float = 1.0,
    horizon: float = 7 * 86_400.0,
) -> T:
    """Run `scenario` on a swarm whose coordinator runs already; its nodes are for the scenario to start.

    Afterwards every planned fault must have fired.
    """
    plan = plan or FaultPlan(folder / "faults")

    async def main() -> T:
        swarm = VirtualSwarm(spec, folder, members, plan, seed, step_seconds)
        with swarm.installed():
            await swarm.coordinator.start()
            return await scenario(swarm)

    random.seed(seed)
    torch.set_num_threads(1)
    result = run(main(), horizon)
    plan.assert_all_fired()
    return result


def remembered_decode() -> Callable[[PayloadLayout, bytes], dict[str, SparseTensor]]:
    """`decode`, which does its work once for equal payloads.

    Every replica decodes every payload twice, when it checks it and when it applies it: in one process, a
    third of the time of a test. No caller changes what it gets.
    """
    known: dict[tuple[tuple[str, ...], bytes], dict[str, SparseTensor]] = {}

    def decode_once(layout: PayloadLayout, data: bytes) -> dict[str, SparseTensor]:
        key = tuple(layout.tensors), data
        if key not in known:
            known[key] = decode(layout, data)
        return known[key]

    return decode_once


def digest_of(path: Path) -> str:
    """sha-256 over the names and bytes of the tensors in a safetensors file."""
    found = hashlib.sha256()
    with safe_open(path, framework="numpy") as file:
        for name in sorted(file.keys()):
            found.update(name.encode() + file.get_tensor(name).tobytes())
    return found.hexdigest()
