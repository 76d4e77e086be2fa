"""Keeps the coordinator's DHT peer and the members informed of members, excluded peers and sources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn, Protocol

from coordinator.membership.sources import NOTHING, MemberSources, Position
from coordinator.run.command_loop import ADMISSION_TOPIC, RUN_TOPIC, CommandLoop, Stopped
from coordinator.run.state.state import State
from protocol.errors import HetnodeError
from protocol.group.peers import PeerRecord
from protocol.server.limits import source_of_host
from protocol.trust.endpoints import split_endpoint
from protocol.types import PROTOCOL_VERSION, Capacity, PeerId, Role

log = logging.getLogger(__name__)

TELL_SECONDS = 0.5
"""Many members may join at once, and most joins bring a new plan anyway: both go into one message."""


UPDATES_PER_SECOND = 200.0
"""Updates about new sources, to all members together: when a thousand join, each join concerns a thousand."""


_RECORD_SECONDS = 900.0  # as those of nodes


def seconds_to_tell(members: int) -> float:
    """Seconds that new sources wait for further ones: `members` members then get them in one update."""
    return max(TELL_SECONDS, members / UPDATES_PER_SECOND)


class AdmittingPeer(Protocol):
    """The coordinator's own DHT peer."""

    @property
    def arbiter(self) -> object | None:
        """None if this peer serves no payloads, only the DHT."""

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId],
        sources: Collection[str],
        members: Collection[PeerId],
    ) -> None:
        """Serve payloads to exactly `peers`, and refuse all calls of `banned`.

        Accept connections of `members` alone, and these only from `sources`.

        Raises HetnodeError if that failed.
        """

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        """Sign `record` and let members find it for `ttl` seconds. Raises HetnodeError if that failed."""


async def keep_admitted(command_loop: CommandLoop, dht_peer: AdmittingPeer, sources: MemberSources) -> None:
    """Send every change of members, excluded peers and sources to the DHT peer."""
    known = frozenset[PeerId](), frozenset[PeerId](), NOTHING

    def changed(state: State) -> tuple[frozenset[PeerId], frozenset[PeerId], Position] | None:
        # Only members fetch payloads, so the others need not be known without an arbiter.
        placed = state.placed if dht_peer.arbiter is not None else frozenset()
        now = placed, state.excluded, sources.position
        return None if now == known else now

    with suppress(Stopped):
        while True:
            known = placed, excluded, position = await command_loop.until(ADMISSION_TOPIC, changed)
            try:
                members = (placed | sources.peers) - excluded
                # Members that call in vain, because this coordinator has moved, find it through this peer.
                known_places = sources.without(excluded) | _places(command_loop.state, placed - excluded)
                await dht_peer.admit(placed, excluded, known_places, members)
            except HetnodeError as error:
                log.error("the DHT peer may still serve banned peers, or refuse members: %s", error)
            else:
                sources.admitted = position
                command_loop.wake(ADMISSION_TOPIC)


async def keep_published(dht_peer: AdmittingPeer, peer: PeerId, api: str) -> NoReturn:
    """Let members find the coordinator `peer` at ``host:port`` of its API, wherever it was before."""
    record = PeerRecord(peer, PROTOCOL_VERSION, Role.RELAY, Capacity("", 0, 0), api, None)
    while True:
        try:
            await dht_peer.publish(record, _RECORD_SECONDS)
        except HetnodeError as error:
            log.warning("members that do not know this address cannot find it yet: %s", error)
        await asyncio.sleep(_RECORD_SECONDS / 3)


async def tell_sources(command_loop: CommandLoop, sources: MemberSources) -> None:
    """Wake the watchers soon after new sources were noted."""

    def newer(_: State) -> Position | None:
        return sources.position if sources.position > sources.told else None

    with suppress(Stopped):
        while True:
            await command_loop.until(ADMISSION_TOPIC, newer)
            await asyncio.sleep(seconds_to_tell(len(sources.peers)))
            sources.told = sources.position
            command_loop.wake(RUN_TOPIC)


def _places(state: State, peers: Collection[PeerId]) -> frozenset[str]:
    """The addresses at which these peers accept links, as sources."""
    endpoints = (state.peers[peer].endpoint for peer in peers)
    return frozenset(source_of_host(split_endpoint(each)[0]) for each in endpoints if each) - {""}
