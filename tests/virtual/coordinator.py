"""The production coordinator on the virtual clock: command loop, access and service. Its log is in memory."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from coordinator.api import member_server, service
from coordinator.api.access import AccessControl
from coordinator.api.admission import keep_admitted
from coordinator.api.operator import OperatorService
from coordinator.api.run_records import RunRecords
from coordinator.app import TICK_SECONDS
from coordinator.arbiter import arbitrate_contested
from coordinator.membership.open_places import CLOSED
from coordinator.membership.sources import MemberSources
from coordinator.ops.health.alarm import judge_health
from coordinator.ops.health.monitor import HealthMonitor
from coordinator.ops.receipts import Receipts
from coordinator.run import command_loop
from coordinator.run.command_loop import CommandLoop
from coordinator.run.decide import Outcome
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
from node.exchange.transport import Entry
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.pb import operator_pb2_grpc
from protocol.spec.run import RunSpec
from protocol.status import AlarmMode
from protocol.trust.names import peer_uri
from tests.builders import Keyed, keyed
from tests.support.certificates import authority
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

    It has an arbiter if `dht` is given.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        rpc: VirtualGrpc,
        observe: Callable[[Event, State], None],
        dht: Dht | None = None,
    ) -> None:
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

    async def start(self) -> None:
        """Return as soon as the service answers calls."""
        assert self.process is None or self.process.has_ended
        self.process = VirtualProcess(NAME)
        serving = asyncio.get_running_loop().create_future()
        start(self.process, self._main(serving), name="coordinator")
        await serving

    def kill(self) -> None:
        """SIGKILL: everything that is not in the log is lost."""
        assert self.process is not None
        self._rpc.kill(self.process)

    async def inject(self, event: Event) -> None:
        """Store and publish `event` as if a rule had decided it."""
        decide, injected = command_loop.decide, Tick()

        def decide_or_inject(state: State, command: Command, now: float) -> Outcome:
            if command is injected:
                transaction = Transaction(state, now)
                transaction.add(event)
                return Outcome(transaction.state, tuple(transaction.steps))
            return decide(state, command, now)

        with patch.object(command_loop, "decide", decide_or_inject):
            await self.command_loop.execute(injected)

    async def _main(self, serving: asyncio.Future[None]) -> None:
        clock = asyncio.get_running_loop().time
        state = restore(self.store, self._spec, self.run)
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
            access = AccessControl(command_loop, sources, str)
            store = cast(SqliteStore, self.store)
            receipts = Receipts(access, self._spec, self.run, history, store)
            admission = member_server.admission(access, self._spec, str, lambda _: None)
            server = member_server.new_server(admission, self._spec)
            server.add_secure_port(ADDRESS, None)
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
                ),
                server,
            )
            operator_pb2_grpc.add_OperatorServicer_to_server(  # type: ignore[no-untyped-call]
                OperatorService(access, None, (receipts,)), server
            )
            await command_loop.execute(Start())
            if self._dht is not None:
                await self._start_arbiter(command_loop, self._dht, sources, group)
            await server.start()
            serving.set_result(None)
            while True:
                await command_loop.tick()
                await judge_health(command_loop, health, AlarmMode.OFF)
                await asyncio.sleep(TICK_SECONDS)

    async def _start_arbiter(
        self, command_loop: CommandLoop, dht: Dht, sources: MemberSources, group: asyncio.TaskGroup
    ) -> None:
        self._rpc.register(NAME, peer_uri(COORDINATOR.peer))
        package, entry = VirtualPackage(self._rpc, dht), Entry(self.run, self._folder, self._folder)

        async def enter() -> Entry:
            return entry

        me: Any = COORDINATOR
        arbiter = await package.start_arbiter(me, enter, self._spec, self._folder / "contested")
        await command_loop.execute(AppointArbiter(COORDINATOR.peer))
        group.create_task(keep_admitted(command_loop, arbiter, sources))
        group.create_task(arbitrate_contested(command_loop, arbiter))
