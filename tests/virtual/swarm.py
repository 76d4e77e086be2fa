"""Whole swarms on a virtual clock: :func:`play` a scenario with production nodes and coordinator."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.rollback import problem_of
from coordinator.run.state.events import AnchorDiverged, Event
from coordinator.run.state.state import State
from coordinator.status.messages import run_message
from node import hooks
from node.core.worker.trainer import Trainer
from node.home.guest.guest import Guest
from node.net.addresses import ClaimedPorts
from node.options import NodeOptions
from node.process import run_node
from node.security.credentials import RunCredentials, folder_of
from node.security.identity import Identity
from protocol.errors import ExitCode, HetnodeError, first_error
from protocol.roles import RoleWish
from protocol.spec.run import RunSpec
from protocol.trust.names import peer_uri
from protocol.types import Capacity, Committed, Decision, PeerId, Role, entries_of
from tests.builders import decisions_in
from tests.support.cached_decode import cached_decode
from tests.support.certificates import credentials
from tests.support.fault_hooks import FaultHooks, checkpoint_faults
from tests.support.fault_script import Script
from tests.support.faults import FaultPlan
from tests.virtual.coordinator import ADDRESS, COORDINATOR, VirtualCoordinator
from tests.virtual.loop import VirtualLoop, VirtualProcess, run, running_loop, start
from tests.virtual.network import Network, current_machine
from tests.virtual.node import VirtualNode, VirtualProcessControl
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.transport import Dht, VirtualPackage
from tests.virtual.worker import VirtualWorker

log = logging.getLogger(__name__)
T = TypeVar("T")

SUPERVISOR_SECONDS = 5.0


class VirtualSwarm:
    """A coordinator and nodes on one virtual network. Create it with :func:`play`.

    Attributes:
        events: all events of the coordinator, also of those before a restart.
        is_supervised: a node that ends with a network error is started again, as by a supervisor.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        members: Mapping[str, Role | RoleWish],
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
        self._pending_restarts: set[str] = set()
        self._failure: BaseException | None = None
        self._watchers: list[tuple[Callable[[State], bool], asyncio.Future[None]]] = []
        self.coordinator = VirtualCoordinator(spec, folder / "coordinator", self.rpc, self._observe, self.dht)
        self.nodes = {name: self._machine(name, role) for name, role in members.items()}

    @property
    def state(self) -> State:
        return self.coordinator.state

    def standby(self, name: str) -> VirtualCoordinator:
        """A standby of the coordinator, which follows it from now on, on a machine of its own."""
        found = VirtualCoordinator(self.spec, self.folder / name, self.rpc, self._observe, self.dht, name)
        found.follow(self.coordinator)
        return found

    async def take_over(self, standby: VirtualCoordinator) -> None:
        """Go on with `standby`. AssertionError if anything is lost that anyone may have learned."""
        held = list(standby.store.events())
        assert held[: len(self.events)] == self.events, "the standby lacks what was told"
        self.events[:] = held
        self.coordinator = standby
        await standby.take_over()

    @property
    def loop(self) -> VirtualLoop:
        return running_loop()

    def peer(self, name: str) -> PeerId:
        return self.nodes[name].identity.peer

    def start(self, *names: str) -> None:
        """Start the nodes `names`, or all of them."""
        for name in names or self.nodes:
            node = self.nodes[name]
            assert not node.is_running, name
            node.process, node.leaving = VirtualProcess(name), asyncio.Event()
            script = Script(
                self.plan.faults_of(name),
                self.plan.report_of(name),
                VirtualProcessControl(self, name),
                self.loop.time,
            )
            self.plan.folder.mkdir(parents=True, exist_ok=True)
            node.process.context.run(hooks.install, FaultHooks(script))
            node.task = start(node.process, self._node(node), name=name)
            node.task.add_done_callback(partial(self._has_ended, name))

    def kill(self, *names: str) -> None:
        """SIGKILL: the nodes run no further step. Their files are kept."""
        for name in names:
            process = self.nodes[name].process
            assert process is not None
            self.rpc.kill(process)

    def trainer(self, name: str) -> Trainer:
        """What the node's worker, in its newest process, has built."""
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

    def guest(self, name: str) -> Guest:
        """What the node may do at present."""
        found = self.nodes[name].guest
        assert found is not None
        return found

    def start_later(self, name: str, seconds: float) -> None:
        """Start the node again after `seconds`."""

        async def restart() -> None:
            await asyncio.sleep(seconds)
            self._pending_restarts.discard(name)
            self.start(name)

        self._pending_restarts.add(name)
        start(VirtualProcess("test"), restart())

    def suspend(self, name: str, seconds: float | None = None) -> None:
        """SIGSTOP, for `seconds` or until :meth:`resume`."""
        process = self.nodes[name].process
        assert process is not None
        self.loop.suspend(process)
        self.network.start_keepalive(process)
        if seconds is not None:
            start(VirtualProcess("test"), self._resume_after(process, seconds))

    def resume(self, name: str) -> None:
        process = self.nodes[name].process
        assert process is not None
        self.loop.resume(process)

    async def until(
        self, condition: Callable[[State], bool], what: str = "", seconds: float = 3600.0
    ) -> None:
        """Wait until the coordinator's state fulfils `condition`. AssertionError after `seconds`."""
        if self._failure is not None:
            raise self._failure
        if condition(self.state):
            return
        reached = self.loop.create_future()
        self._watchers.append((condition, reached))
        try:
            async with asyncio.timeout(seconds):
                await reached
        except TimeoutError:
            errors = {node.name: node.errors for node in self.nodes.values() if node.errors}
            latest = "\n".join(repr(event)[:400] for event in self.events[-20:])
            raise AssertionError(
                f"not within {seconds:.0f} s: {what}; {run_message(self.state)} {errors}\n{latest}"
            ) from None

    async def until_round(self, number: int, seconds: float = 3600.0) -> None:
        """Wait until round `number` is open."""
        await self.until(lambda state: state.current_round >= number, f"round {number}", seconds)

    async def until_kept(self, restore_round: int, seconds: float = 60.0) -> None:
        """Wait until peers tell that they keep the anchors after that round: heartbeats are no events."""
        async with asyncio.timeout(seconds):
            while problem_of(self.state, restore_round):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def until_fired(self, name: str, count: int = 1, seconds: float = 3600.0) -> None:
        """Wait until `count` planned faults have struck the node."""
        async with asyncio.timeout(seconds):
            while len(self.plan.fired(name)) < count:  # noqa: ASYNC110  the report is a file
                await asyncio.sleep(0.05)

    async def until_over(self, *names: str, seconds: float = 86_400.0) -> None:
        """Wait until the nodes `names`, or all that run, have ended. Raises the error of a failed node."""
        nodes = [
            node for node in self.nodes.values() if node.name in names or (not names and node.is_running)
        ]
        tasks = [node.task for node in nodes if node.task is not None]
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(asyncio.shield(task) for task in tasks))
        except TimeoutError:
            raise AssertionError(f"not over within {seconds:.0f} s {self.loop.open_tasks()}") from None

    async def until_all_over(self, but: str = "", seconds: float = 86_400.0) -> None:
        """Wait until all nodes have ended without an error, also nodes that will be started again.

        Args:
            but: a part of the message of an error that is allowed.
        """
        async with asyncio.timeout(seconds):
            for node in self.nodes.values():
                while node.name in self._pending_restarts or node.is_running:  # noqa: ASYNC110  its task does not exist yet
                    await asyncio.sleep(1.0)
                error = node.task.exception() if node.task else None
                if error is not None and (not but or but not in str(error)):
                    raise error

    @property
    def decisions(self) -> list[Decision]:
        return decisions_in(self.events)

    def committed(self, stage: int = 0) -> list[int]:
        return [each.round_number for each in decisions_in(self.events, Committed) if each.stage == stage]

    @property
    def rounds(self) -> list[int]:
        """The numbers of all rounds."""
        return list(range(1, self.spec.rounds + 1))

    def weights(self, name: str) -> list[float]:
        """Of the payloads of a node that count."""
        entries = [entry.descriptor for each in self.decisions for entry in entries_of(each)]
        return [each.weight for each in entries if each.owner == self.peer(name)]

    def measured(self) -> dict[tuple[str, int], dict[str, Any]]:
        """The measurements of the rounds, by node and round."""
        names = {self.peer(name): name for name in self.nodes}
        lines = (self.folder / "coordinator" / "metrics.jsonl").read_text().splitlines()
        found = [line for line in map(json.loads, lines) if line["event"] == "measurement" and line["round"]]
        return {(names[line["peer"]], line["round"]): line for line in found}

    def happened(self, *kinds: type[Event]) -> list[Any]:
        """The events of these kinds."""
        return [event for event in self.events if isinstance(event, kinds)]

    def diverged(self) -> list[AnchorDiverged]:
        return self.happened(AnchorDiverged)

    def anchors(self, name: str) -> dict[int, str]:
        """sha-256 of the tensors in the last checkpoint of a node that has finished, by stage."""
        return self.nodes[name].anchors

    def assert_all_agree(self, *names: str) -> None:
        """One decision per (stage, round), all rounds decided, and equal final anchors on all nodes."""
        keys = [(each.stage, each.round_number) for each in self.decisions]
        assert len(keys) == len(set(keys)), "a round was decided twice"
        assert len(keys) == self.state.spec.rounds * self.spec.swarm.stages
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
        """Replace gRPC, the transport, the worker's process and the device for all nodes of this swarm."""

        async def start_child(*_: Any, **__: Any) -> VirtualWorker:
            return self._worker()

        async def no_port(ports: ClaimedPorts, _: RunCredentials) -> None:
            ports.dht_port = 1  # the DHT of these swarms has no ports

        with (
            self.rpc.installed(),
            # A machine of this swarm never loses the cache of its disk.
            patch("os.fsync", lambda descriptor: None),
            # SIGKILL releases a lock, but here one real process runs the node again.
            patch("node.process.lock_folder", lambda folder: nullcontext()),
            patch("node.process.answer_commands", lambda *_: nullcontext()),
            patch(
                "node.measure.measure.measure_capacity",
                lambda device, threads, _: Capacity(device, 2**30, threads),
            ),
            patch("node.net.link.clock", self.loop.time),
            # Else a busy machine, or a new interface on it, looks like an address that has changed.
            patch("node.net.own_address.wall_clock", self.loop.time),
            patch("node.net.own_address.interface_addresses", frozenset),
            patch("node.ipc.ranks.start_child", start_child),
            patch("node.runtime.transport_in_use", lambda: VirtualPackage(self.rpc, self.dht)),
            patch("node.net.addresses.ClaimedPorts.hold", no_port),
            # A worker that builds again frees its device. Here that would search the objects of all nodes.
            patch("node.core.worker.worker.gc", SimpleNamespace(collect=lambda: None)),
            checkpoint_faults(),
            patch("node.core.optimizer.received.decode", cached_decode()),
        ):
            yield

    async def _node(self, node: VirtualNode) -> Path:
        options = NodeOptions(
            invite=None,
            run=self.coordinator.run,
            role=RoleWish(node.role),
            folder=node.folder,
            advertise=None if node.dial_only else node.name,
            dial_only=node.dial_only,
            memory_limit=node.memory_limit,
            own_data=node.own_data,
        )
        try:
            node.guest = Guest(node.folder, node.rules)
            return await run_node(options, node.identity, node.leaving, node.guest)
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

    def _node_here(self) -> VirtualNode:
        return self.nodes[current_machine()]

    def _machine(self, name: str, role: Role | RoleWish) -> VirtualNode:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
        identity = Identity(folder / "identity.key", key, lock=-1)
        RunCredentials(
            folder_of(identity.path, self.coordinator.run),
            self.coordinator.run,
            ADDRESS,
            COORDINATOR.peer,
            None,
            credentials(identity.peer, self.coordinator.authority),
        ).save()
        self.rpc.register(name, peer_uri(identity.peer))
        return VirtualNode(name, role, folder, identity)

    def _observe(self, event: Event, state: State) -> None:
        self.events.append(event)
        for condition, reached in list(self._watchers):
            if not reached.done() and condition(state):
                reached.set_result(None)
        self._watchers = [(c, reached) for c, reached in self._watchers if not reached.done()]

    def _has_ended(self, name: str, task: asyncio.Task[Path]) -> None:
        """End the scenario if the node ended with anything but a HetnodeError: that is a bug."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, HetnodeError):
            if self.is_supervised and error.code.exit_code is ExitCode.NETWORK:
                self.start_later(name, SUPERVISOR_SECONDS)
        elif error is not None:
            self._failure = error
            for _, reached in self._watchers:
                if not reached.done():
                    reached.set_exception(error)

    async def _resume_after(self, process: VirtualProcess, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not process.has_ended:
            self.loop.resume(process)


def play(
    scenario: Callable[[VirtualSwarm], Awaitable[T]],
    spec: RunSpec,
    folder: Path,
    members: Mapping[str, Role | RoleWish],
    *,
    plan: FaultPlan | None = None,
    seed: int = 0,
    step_seconds: float = 1.0,
    horizon: float = 7 * 86_400.0,
) -> T:
    """Run `scenario` on a swarm. The coordinator runs already; the scenario starts the nodes.

    Messages take other times with each `seed`, and with each number in HETNODE_SEARCH.

    Raises AssertionError if a planned fault has not fired.
    """
    seed += int(os.environ.get("HETNODE_SEARCH", "0"))
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
