"""Three machines on a virtual network, for tests of the network itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

from node import hooks
from node.exchange.transport import ServedStages
from node.net.coordinator_client import CoordinatorClient
from node.security.credentials import RunCredentials
from protocol.trust.names import peer_uri
from tests.builders import keyed, spec_of
from tests.support.certificates import credentials
from tests.support.fault_hooks import FaultHooks
from tests.support.fault_script import Script
from tests.support.faults import FaultPlan
from tests.virtual.coordinator import ADDRESS, COORDINATOR, VirtualCoordinator
from tests.virtual.loop import VirtualProcess, run, running_loop, start
from tests.virtual.network import Network
from tests.virtual.node import VirtualProcessControl
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.transport import Dht, VirtualTransport

A, B, C = keyed(1), keyed(2), keyed(3)
NAMES = {"a": A, "b": B, "c": C}


class Machines:
    """The machines a, b and c and a coordinator on one network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spec = folder, spec_of(stages=1)
        self.network = Network(Random(0))
        self.rpc = VirtualGrpc(self.network)
        self.dht = Dht()
        self.processes = {name: VirtualProcess(name) for name in NAMES}
        for name, member in NAMES.items():
            self.rpc.register(name, peer_uri(member.peer))
        self.coordinator = VirtualCoordinator(
            self.spec, folder / "coordinator", self.rpc, lambda event, state: None
        )
        self.run_id = self.coordinator.run

    def on(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as a task of the machine `name`."""
        return start(self.processes[name], work)

    def kill(self, *names: str) -> None:
        for name in names:
            self.rpc.kill(self.processes[name])

    def suspend(self, name: str, seconds: float) -> None:
        raise NotImplementedError

    def plan(self, name: str, plan: FaultPlan) -> None:
        """Let the faults of `plan` strike the machine `name`."""
        plan.folder.mkdir(parents=True, exist_ok=True)
        control = VirtualProcessControl(self, name)
        script = Script(plan.faults_of(name), plan.report_of(name), control, running_loop().time)
        self.processes[name].context.run(hooks.install, FaultHooks(script))

    def client(self, name: str) -> CoordinatorClient:
        """A client for the peer of the machine `name`. Calls come from the machine that runs them."""
        run_credentials = RunCredentials(
            self.folder,
            self.run_id,
            ADDRESS,
            COORDINATOR.peer,
            None,
            credentials(NAMES[name].peer, self.coordinator.authority),
        )
        return CoordinatorClient(run_credentials, NAMES[name])  # type: ignore[arg-type]

    async def transport(self, name: str) -> VirtualTransport:
        """A transport for the peer of the machine `name`. Call it on that machine."""
        transport = VirtualTransport(self.rpc, self.dht, NAMES[name], self.run_id, client_mode=False)  # type: ignore[arg-type]
        await transport.host_stages(
            ServedStages({0: 1000}, self.folder / name, self.folder / name / "checkpoint", 30)
        )
        await transport.admit([member.peer for member in NAMES.values()])
        return transport


Scenario = Callable[[Machines], Awaitable[None]]
Simulate = Callable[[Scenario], None]


def simulate(scenario: Scenario, folder: Path) -> None:
    """Run `scenario` on a virtual loop."""

    async def main() -> None:
        machines = Machines(folder)
        with machines.rpc.installed():
            await scenario(machines)

    run(main(), horizon=10_000)
