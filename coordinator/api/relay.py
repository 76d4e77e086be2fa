"""What the coordinator asks of its own relay. A leaf is one (coordinator.ops.relay)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from coordinator.api.public_ports import ListenAddresses, PublicPorts
from coordinator.api.public_server import PublicServer
from coordinator.authority import Authority
from coordinator.membership.sources import MemberSources
from coordinator.run.command_loop import CommandLoop
from protocol.types import PeerId, RelayAddress


class Relay(Protocol):
    """A relay at a public port of its own, or at the one that all share."""

    @property
    def address(self) -> RelayAddress: ...

    @property
    def uplink(self) -> float:
        """Bytes per second that it can send for all nodes together; 0 if that is not known."""
        ...

    async def start(
        self,
        command_loop: CommandLoop,
        authority: Authority,
        sources: MemberSources,
        dht_addresses: Sequence[str],
        servers: tuple[PublicServer, PublicServer],
        stack: AsyncExitStack,
    ) -> None:
        """Carry connections for the peers of the run until `stack` is closed.

        Args:
            dht_addresses: of the coordinator's DHT peer, to which it connects as to the machines of members.
            servers: of the API and of enrollment; those without a gateway are behind the relay's port.
        """


def no_relay(
    addresses: ListenAddresses, ports: PublicPorts, peer: PeerId, stack: AsyncExitStack
) -> Relay | None:
    """Stands in for a relay where none is part of the program."""
    return None
