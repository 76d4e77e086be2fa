"""The production coordinator on the virtual clock: ledger, doorkeeper and service; its log is in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from coordinator import command_loop
from coordinator.api import service
from coordinator.api.access import Access
from coordinator.app import TICK_SECONDS, restore
from coordinator.authority import open_authority
from coordinator.command_loop import CommandLoop
from coordinator.decide import Outcome
from coordinator.metrics import MetricsFile
from coordinator.state.commands import Command, Start, Tick
from coordinator.state.events import Event
from coordinator.state.state import State
from coordinator.status.messages import event_message
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.spec.run import RunSpec
from tests.builders import Keyed, keyed
from tests.support.memory_store import MemoryStore
from tests.virtual.loop import Life, VirtualLoop, start
from tests.virtual.rpc import VirtualGrpc

log = logging.getLogger(__name__)

NAME = "coordinator"
ADDRESS = f"{NAME}:7700"
OWNER: Keyed = keyed(1000)
"""Whose key is the coordinator's."""
URI = "urn:hetnode:coordinator"


class VirtualCoordinator:
    """One run's coordinator, which may be killed and started again; its log outlives it."""

    def __init__(
        self, spec: RunSpec, folder: Path, rpc: VirtualGrpc, observe: Callable[[Event, State], None]
    ) -> None:
        self._spec, self._folder, self._rpc, self._observe = spec, folder, rpc, observe
        self.store = MemoryStore()
        self.life: Life | None = None
        self.command_loop: CommandLoop
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = open_authority(folder, spec.run_id)

    @property
    def state(self) -> State:
        return self.command_loop.state

    async def start(self) -> None:
        """Serve; returns when calls are answered."""
        assert self.life is None or self.life.is_over
        self.life = Life(NAME)
        serving = asyncio.get_running_loop().create_future()
        start(self.life, self._main(serving), name="coordinator")
        await serving

    def kill(self) -> None:
        """SIGKILL: what is not in the log is lost."""
        assert self.life is not None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.end(self.life)
        self._rpc.has_died(self.life)

    async def happen(self, event: Event) -> None:
        """Let `event` happen as if a rule had decided it."""
        decide, given = command_loop.decide, Tick()

        def decide_given(state: State, spec: RunSpec, command: Command, now: float) -> Outcome:
            return Outcome((event,)) if command is given else decide(state, spec, command, now)

        with patch.object(command_loop, "decide", decide_given):
            await self.command_loop.execute(given)

    async def _main(self, serving: asyncio.Future[None]) -> None:
        clock = asyncio.get_running_loop().time
        state = restore(self.store, self._spec)
        metrics = MetricsFile(self._folder / "metrics.jsonl")

        def tell(event: Event, state: State) -> None:
            log.info("%s", event_message(event))
            metrics.record(event)
            self._observe(event, state)

        self.command_loop = command_loop = CommandLoop(
            self._spec, self.store, state, tell, lambda text: log.info("%s", text), clock=clock
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(command_loop.run())
            server = service.new_server()
            server.add_secure_port(ADDRESS, None)
            pb_grpc.add_CoordinatorServicer_to_server(  # type: ignore[no-untyped-call]
                service.CoordinatorService(
                    command_loop, metrics, Access(command_loop), self.authority, OWNER.sign, ("virtual",)
                ),
                server,
            )
            await command_loop.execute(Start())
            await server.start()
            serving.set_result(None)
            while True:
                await command_loop.tick()
                await asyncio.sleep(TICK_SECONDS)
