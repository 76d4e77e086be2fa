"""The production coordinator on the virtual clock: command loop, access and service. Its log is in memory."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from coordinator.api import member_server, service
from coordinator.api.access import AccessControl
from coordinator.api.admission import keep_admitted
from coordinator.api.operator import OperatorService
from coordinator.api.run_records import RunRecords
from coordinator.api.succession import PARTNER_FILE, Fence, Partner
from coordinator.app import TICK_SECONDS
from coordinator.arbiter import arbitrate_contested
from coordinator.membership.open_places import CLOSED
from coordinator.membership.sources import MemberSources
from coordinator.ops.health.alarm import judge_health
from coordinator.ops.health.monitor import HealthMonitor
from coordinator.ops.receipts import Receipts
from coordinator.ops.standby import StandbyDesk
from coordinator.run import command_loop
from coordinator.run.command_loop import CommandLoop, Stopped
from coordinator.run.decide import Applied
from coordinator.run.state.commands import AppointArbiter, Command, Start, Tick
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from coordinator.status.messages import event_message
from coordinator.store.decision_log import DecisionLog
from coordinator.store.history import SqliteHistory
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.metrics import MetricsFile
from coordinator.store.restore import restore
from coordinator.store.store import SqliteStore
from node.cli.standby import follow
from node.exchange.transport import Entry
from node.net.coordinator_channel import CoordinatorChannel, fetch_status
from protocol.errors import HetnodeError, first_error
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.pb import operator_pb2_grpc
from protocol.spec.run import RunSpec
from protocol.status import AlarmMode
from protocol.trust.names import OPERATOR_URI, peer_uri
from protocol.trust.term import next_term
from tests.builders import Keyed, keyed
from tests.support.certificates import authority, credentials
from tests.support.dial_back import believe
from tests.support.memory_store import MemoryStore
from tests.virtual.loop import VirtualProcess, start
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.transport import Dht, VirtualPackage

log = logging.getLogger(__name__)

NAME = "coordinator"
ADDRESS = f"{NAME}:7700"
COORDINATOR: Keyed = keyed(1000)
"""The coordinator's own peer."""


class VirtualCoordinator:
    """The coordinator of one run. A test can kill it and start it again; its log is kept.

    It has an arbiter if `dht` is given. `name` is that of its machine.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        rpc: VirtualGrpc,
        observe: Callable[[Event, State], None],
        dht: Dht | None = None,
        name: str = NAME,
    ) -> None:
        self.name, self.address = name, f"{name}:7700"
        self._spec, self._folder, self._rpc, self._observe = spec, folder, rpc, observe
        self._dht = dht
        self.terms = CLOSED
        """For peers without an invite, from the next start on."""
        self.store = MemoryStore()
        self.process: VirtualProcess | None = None
        self.command_loop: CommandLoop
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = authority(spec.name)  # the same for all runs, because the run id contains it
        self.run = self.authority.run_id(spec)

    @property
    def state(self) -> State:
        return self.command_loop.state

    async def start(self, takes_over: bool = False) -> None:
        """Return as soon as the service answers calls. Raises HetnodeError COORDINATOR_REPLACED."""
        assert self.process is None or self.process.has_ended
        self.process = VirtualProcess(self.name)
        serving = asyncio.get_running_loop().create_future()
        self.task = start(self.process, self._main(serving, takes_over), name="coordinator")
        await asyncio.wait({serving, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.ended()

    async def ended(self) -> None:
        """Wait for the end of this process. Raises its HetnodeError."""
        try:
            await self.task
        except BaseExceptionGroup as error:
            raise first_error(error) from None

    def follow(self, followed: VirtualCoordinator) -> None:
        """Be the standby of a coordinator, from a backup of its folder on, until the next start."""
        self.store, self.process = copy.deepcopy(followed.store), VirtualProcess(self.name)
        (self._folder / PARTNER_FILE).write_text(followed.address)
        self._rpc.register(self.name, OPERATOR_URI)
        own = credentials(COORDINATOR.peer, self.authority)
        following = follow(self.store, lambda: CoordinatorChannel(followed.address, own), self.address)
        self.task = start(self.process, following, name="standby")

    async def take_over(self) -> None:
        """End as a standby, and go on as the coordinator."""
        self.kill()
        await self.start(takes_over=True)

    def kill(self) -> None:
        """SIGKILL: everything that is not in the log is lost."""
        assert self.process is not None
        self._rpc.kill(self.process)

    async def inject(self, event: Event) -> None:
        """Store and publish `event` as if a rule had decided it."""
        decide, injected = command_loop.decide, Tick()

        def decide_or_inject(state: State, command: Command, now: float) -> Applied:
            if command is injected:
                transaction = Transaction(state, now)
                transaction.add(event)
                return Applied(transaction.state, tuple(transaction.steps))
            return decide(state, command, now)

        with patch.object(command_loop, "decide", decide_or_inject):
            await self.command_loop.execute(injected)

    async def _term_at(self, address: str, proof: bytes) -> int | None:
        try:
            own = replace(credentials(COORDINATOR.peer, self.authority), term=proof)
            return (await fetch_status(address, own)).term
        except HetnodeError:
            return None

    async def _main(self, serving: asyncio.Future[None], takes_over: bool) -> None:
        clock = asyncio.get_running_loop().time
        state = restore(self.store, self._spec, self.run)
        self._rpc.register(self.name, peer_uri(COORDINATOR.peer))
        partner = Partner(self._folder, self._term_at, takes_over)
        await partner.check(self.authority, state.term)
        metrics = MetricsFile(self._folder / "metrics.jsonl")
        history = SqliteHistory(self._folder / HISTORY_FILE)  # which nobody writes
        health = HealthMonitor(state)

        def publish(event: Event, _: State, state: State) -> None:
            log.info("%s", event_message(event))
            metrics.record(event)
            health.note(event)
            self._observe(event, state)

        self.command_loop = command_loop = CommandLoop(self.store, state, publish, clock=clock)
        async with asyncio.TaskGroup() as group:
            group.create_task(command_loop.run())
            sources = MemberSources()
            records = RunRecords(
                metrics,
                DecisionLog(self.store),
                health,
                history,
                Counter(),
            )
            fence = Fence(command_loop, partner, COORDINATOR.peer, COORDINATOR.sign, (self.address,))
            group.create_task(fence.keep())
            access = AccessControl(command_loop, sources, str, fence=fence.check)
            store = cast(SqliteStore, self.store)
            self.desk = standby = StandbyDesk(store, metrics, fence)
            command_loop.confirmed = standby.confirmed
            receipts = Receipts(access, self._spec, self.run, history, store)
            admission = member_server.admission(access, self._spec, str, lambda _: None)
            server = member_server.new_server(admission, self._spec)
            server.add_secure_port(self.address, None)
            pb_grpc.add_CoordinatorServicer_to_server(  # type: ignore[no-untyped-call]
                service.CoordinatorService(
                    command_loop,
                    records,
                    access,
                    sources,
                    self.authority,
                    COORDINATOR.sign,
                    ("virtual",),
                    believe,
                    terms=self.terms,
                    succession=fence.told,
                ),
                server,
            )
            operator_pb2_grpc.add_OperatorServicer_to_server(  # type: ignore[no-untyped-call]
                OperatorService(access, (standby,), (receipts,)), server
            )
            await partner.check_silent()
            await command_loop.execute(Start(next_term(state.term, clock()) if takes_over else 0))
            if self._dht is not None:
                await self._start_arbiter(command_loop, self._dht, sources, group)
            await server.start()
            serving.set_result(None)
            while True:
                try:
                    await command_loop.tick()
                except Stopped:
                    fence.raise_error()
                await judge_health(command_loop, health, AlarmMode.OFF)
                await asyncio.sleep(TICK_SECONDS)

    async def _start_arbiter(
        self, command_loop: CommandLoop, dht: Dht, sources: MemberSources, group: asyncio.TaskGroup
    ) -> None:
        package, entry = VirtualPackage(self._rpc, dht), Entry(self.run, self._folder, self._folder)

        async def enter() -> Entry:
            return entry

        me: Any = COORDINATOR
        arbiter = await package.start_arbiter(me, enter, self._spec, self._folder / "contested")
        await command_loop.execute(AppointArbiter(COORDINATOR.peer))
        group.create_task(keep_admitted(command_loop, arbiter, sources))
        group.create_task(arbitrate_contested(command_loop, arbiter))
