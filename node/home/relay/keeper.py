"""Keeps a node reachable through the nearest relay of its run, and through another one when that is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NoReturn

from node.home.relay.agent import LocalServer, RelayAgent
from node.net.membership import jittered
from node.net.peer_address import round_trip
from node.security.credentials import Credentials
from protocol.relay.exposed import RelayedService
from protocol.server.admitted_sources import EVERYONE, AdmittedSources
from protocol.server.splice import SpliceEnd
from protocol.trust.endpoints import split_endpoint
from protocol.trust.host_port import host_port
from protocol.types import PeerId, RelayAddress

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_MOST_MEASURED = 16
_LOOK_SECONDS, _SEARCH_SECONDS = 0.5, 5.0


@dataclass(frozen=True)
class Exposure:
    """Where others reach this node: ``host:port`` for links and of its DHT peer, both of the relay."""

    relay: RelayAddress
    endpoint: str
    dht: str


class RelayKeeper:
    """Makes local servers of `peer` reachable.

    Args:
        credentials, servers: see :class:`RelayAgent`.
        relays: called for each choice; the relays that may be taken.
        patience: a relay that is away for more seconds is given up. To take another one costs every link of
            this node, so a relay that is only started again is waited for.
    """

    def __init__(
        self,
        peer: PeerId,
        credentials: Callable[[], Credentials],
        servers: Mapping[RelayedService, LocalServer],
        relays: Callable[[], Sequence[RelayAddress]],
        patience: float = 8.0,
    ) -> None:
        self._patience = patience
        self._peer, self._credentials, self._servers, self._relays = peer, credentials, servers, relays
        self._admitted = AdmittedSources(EVERYONE)
        self._agent: RelayAgent | None = None
        self._keeping: asyncio.Task[None] | None = None

    def admit(self, admitted: AdmittedSources) -> None:
        """Carry connections to the DHT peer from these sources alone; see :meth:`RelayAgent.admit`."""
        self._admitted = admitted
        if self._agent is not None:
            self._agent.admit(admitted)

    async def connect(self) -> Exposure | None:
        """Take the nearest relay that answers; None if none does. The former one is given up then."""
        for relay, seconds in await _by_distance(self._relays()):
            agent = RelayAgent(relay, self._peer, self._credentials, self._servers)
            agent.admit(self._admitted)
            keeping = asyncio.create_task(agent.keep())
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await agent.connected()
            except BaseException as error:
                keeping.cancel()
                if isinstance(error, TimeoutError):
                    continue
                raise
            self.close()
            agent.admit(self._admitted)  # it may have changed since
            self._agent, self._keeping = agent, keeping
            log.info("taken: the relay %s, %.1f ms there and back", relay.endpoint, 1000 * seconds)
            return _exposure(agent)
        return None

    async def keep(
        self, exposure: Exposure | None, changed: Callable[[Exposure], Awaitable[None]]
    ) -> NoReturn:
        """Call `changed` whenever others reach this node elsewhere than at `exposure`, or there again."""
        known = exposure, self._agent.connections if self._agent else 0
        clock = asyncio.get_running_loop().time
        next_search = clock()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            is_gone = self._agent is None or self._agent.away > self._patience
            if is_gone and clock() >= next_search:
                next_search = clock() + jittered(_SEARCH_SECONDS)
                if self._agent is not None:
                    log.warning("the relay %s is gone: looking for another one", self._agent.relay.endpoint)
                await self.connect()
            if self._agent is None or self._agent.away:
                continue
            now = _exposure(self._agent)
            if known != (now, self._agent.connections):
                known = now, self._agent.connections
                await changed(now)

    async def dial(self, address: str) -> SpliceEnd:
        """As :meth:`RelayAgent.dial`, through the relay that is taken now."""
        if self._agent is None:
            raise ConnectionRefusedError("no relay is taken")
        return await self._agent.dial(address)

    def close(self) -> None:
        """Give the relay up. May be called again."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None


def _exposure(agent: RelayAgent) -> Exposure:
    host, _ = split_endpoint(agent.relay.endpoint)
    return Exposure(agent.relay, agent.relay.endpoint, host_port(host, agent.dht_port))


async def _by_distance(relays: Sequence[RelayAddress]) -> list[tuple[RelayAddress, float]]:
    """The relays that answer, with the seconds there and back, the nearest first."""
    some = relays[:_MOST_MEASURED]
    measured = await asyncio.gather(*(round_trip(each.endpoint, f"the relay {each.peer}") for each in some))
    found = [(relay, seconds) for relay, seconds in zip(some, measured, strict=True) if seconds < inf]
    return sorted(found, key=lambda each: each[1])
