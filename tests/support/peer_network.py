"""Four peers of one transport that know each other: of hivemind over sockets, or of the virtual network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from node.exchange.hive import transport as hive
from node.exchange.transport import ArbiterPeer, Entry, TransportPackage
from node.security.identity import Identity, open_identity
from protocol.spec.run import RunSpec
from protocol.trust.names import peer_uri
from tests.support import commands
from tests.support.hive_nodes import CAPACITY, REFUSED, Node, entry_of, hosted_in
from tests.virtual import loop
from tests.virtual.network import Network
from tests.virtual.rpc import VirtualGrpc
from tests.virtual.transport import Dht, VirtualPackage


@dataclass
class PeerNetwork:
    """The bootstrap peer hosts no stage, alice and bob host stages 0 and 1, carol hosts stage 1.

    Carol's disk takes no payloads, so hers stay in memory, and she sends them without a check of their hash.

    Attributes:
        package: starts the transports. `on_machine` makes one of them callable from the scenario.
    """

    folder: Path
    package: TransportPackage
    stack: AsyncExitStack
    on_machine: Callable[[Identity, Callable[[], Awaitable[Any]]], Awaitable[Any]]
    bootstrap: Node
    alice: Node
    bob: Node
    carol: Node

    async def admit(self, *others: Node, banned: Sequence[Node] = ()) -> None:
        """Tell alice, bob and carol that the plan contains them and `others`."""
        members = (self.alice, self.bob, self.carol)
        peers = [node.identity.peer for node in (*members, *others)]
        for node in members:
            await node.transport.admit(peers, [node.identity.peer for node in banned])

    async def start(
        self,
        name: str,
        stages: Sequence[int] = (),
        payloads: Path | None = None,
        identity: Identity | None = None,
        **entry: Any,
    ) -> Node:
        """Another peer, whose payloads and checkpoints are under its name. It is closed at the end."""
        identity = identity or open_identity(self.folder / f"{name}.key")
        first = [] if name == "bootstrap" else self.bootstrap.transport.addresses

        async def enter() -> Entry:
            return entry_of(identity, **{"initial_peers": first, **entry})

        transport = await self.on_machine(identity, lambda: self.package.start(identity, enter))
        self.stack.push_async_callback(transport.close)
        if stages:
            await transport.admit(())
            hosted = hosted_in(self.folder / name, dict.fromkeys(stages, CAPACITY))
            await transport.host_stages(replace(hosted, payload_folder=payloads or hosted.payload_folder))
        return Node(identity, transport)

    async def start_arbiter(self, name: str, spec: RunSpec) -> tuple[Identity, ArbiterPeer]:
        """A coordinator's peer. It is closed at the end."""
        identity = open_identity(self.folder / f"{name}.key")

        async def enter() -> Entry:
            return entry_of(identity, initial_peers=self.bootstrap.transport.addresses)

        peer = await self.on_machine(
            identity, lambda: self.package.start_arbiter(identity, enter, spec, self.folder / name)
        )
        self.stack.push_async_callback(peer.close)
        return identity, peer


async def _peers(network: PeerNetwork) -> PeerNetwork:
    network.bootstrap = await network.start("bootstrap")
    network.alice, network.bob, network.carol = await asyncio.gather(
        network.start("alice", (0, 1)),
        network.start("bob", (0, 1)),
        network.start("carol", (1,), payloads=REFUSED),
    )
    await network.admit()
    return network


@asynccontextmanager
async def open_network(folder: Path) -> AsyncIterator[PeerNetwork]:
    """Peers of hivemind, over sockets of this machine."""

    async def here(_: Identity, starting: Callable[[], Awaitable[Any]]) -> Any:
        return await starting()

    commands.template()  # the one of all tests; else the first node here would start a smaller one
    none: Any = None
    async with AsyncExitStack() as stack:
        yield await _peers(PeerNetwork(folder, hive, stack, here, none, none, none, none))


@asynccontextmanager
async def open_virtual_network(folder: Path) -> AsyncIterator[PeerNetwork]:
    """Peers of the virtual network, each on a machine of its own. Needs a virtual loop."""
    rpc, none = VirtualGrpc(Network(Random(0))), None

    async def on_machine(identity: Identity, starting: Callable[[], Awaitable[Any]]) -> Any:
        name = identity.path.stem
        rpc.register(name, peer_uri(identity.peer))
        process = loop.VirtualProcess(name)

        async def begin() -> Any:
            return await starting()

        return _OnMachine(process, await loop.start(process, begin()))

    async with AsyncExitStack() as stack:
        network: Any = PeerNetwork(folder, VirtualPackage(rpc, Dht()), stack, on_machine, *4 * [none])
        yield await _peers(network)


class _OnMachine:
    """Calls each method of a transport on the machine of its peer."""

    def __init__(self, process: loop.VirtualProcess, transport: Any) -> None:
        self._process, self._transport = process, transport

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if not callable(found):
            return found

        async def call(*arguments: Any, **options: Any) -> Any:
            return await loop.start(self._process, found(*arguments, **options))

        return call


Scenario: TypeAlias = Callable[[PeerNetwork], Coroutine[Any, Any, None]]
Run: TypeAlias = Callable[[Scenario], None]


@contextmanager
def hive_runs(folder: Path) -> Iterator[Run]:
    """Runs scenarios one after the other with the same peers, over sockets."""
    with asyncio.Runner() as runner:
        opened = open_network(folder)
        network = runner.run(opened.__aenter__())
        try:
            yield lambda scenario: runner.run(scenario(network))
        finally:
            runner.run(opened.__aexit__(None, None, None))


@contextmanager
def virtual_runs(folder: Path) -> Iterator[Run]:
    """Runs each scenario with new peers, on a virtual clock."""
    count = iter(range(1000))

    def run(scenario: Scenario) -> None:
        own = folder / str(next(count))
        own.mkdir()

        async def main() -> None:
            async with open_virtual_network(own) as network:
                await scenario(network)

        loop.run(main(), horizon=10_000)

    yield run
