"""The first peer of a run's DHT, as ``hetnode coordinator`` starts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.private_file import write_whole

if TYPE_CHECKING:
    from node.exchange.transport import ArbiterPeer
    from node.security.identity import Identity


@dataclass(frozen=True)
class BootstrapPeer:
    """The first peer of the run's DHT, which the coordinator hosts. `port` 0 takes the port of last time."""

    folder: Path
    identity: Identity
    spec: RunSpec
    host: str
    port: int
    advertise: str

    async def start(self, run: str) -> ArbiterPeer:
        """Start it for `run`; it starts itself again on its port.

        Raises as :meth:`TransportPackage.start_arbiter` does.
        """
        # Nodes know where the DHT began, so a coordinator that is started again must use the same port.
        kept = self.folder / "dht-port"
        former = _port_in(kept)
        try:
            peer = await self._start_on(run, self.port or former)
        except HetnodeError as error:
            if error.code is not ErrorCode.PORT_IN_USE or self.port:
                raise
            peer = await self._start_on(run, 0)
        write_whole(kept, str(peer.port))
        return peer

    async def _start_on(self, run: str, port: int) -> ArbiterPeer:
        from node.exchange.transport import Entry, transport_in_use  # noqa: PLC0415

        async def enter() -> Entry:
            return Entry(
                run,
                self.folder / "bootstrap.pem",
                self.folder / "authority.pem",
                listen_host=self.host,
                listen_port=port,
                advertise=self.advertise,
                sources=(),  # those of members come with their calls, and so do the members
                members=(),
            )

        contested = self.folder / "contested"
        return await transport_in_use().start_arbiter(self.identity, enter, self.spec, contested)


def _port_in(file: Path) -> int:
    """The port that a coordinator has noted there; 0 where there is none, or a crash has left half of it."""
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return int(text) if text.isdecimal() and int(text) < 1 << 16 else 0
