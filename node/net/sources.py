"""The sources from which this node accepts connections of the transport."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping, Set

from node.net.membership import RunView
from protocol.server.interfaces import private_networks
from protocol.server.limits import source_of_host
from protocol.trust.endpoints import split_endpoint
from protocol.trust.host_port import tcp_place
from protocol.types import PeerId

log = logging.getLogger(__name__)


def member_sources(run_view: RunView) -> frozenset[str]:
    """Where members that are not banned have called the coordinator from, and where they accept links."""
    called = {
        source
        for peer, sources in run_view.sources.items()
        if peer not in run_view.banned
        for source in sources
    }
    endpoints = (
        split_endpoint(member.endpoint)[0]
        for plan in run_view.plans.values()
        for replica in plan.replicas
        for member in replica.members
        if member.endpoint and member.peer not in run_view.banned
    )
    return frozenset(called | {source_of_host(host) for host in endpoints} - {""})


def member_peers(run_view: RunView) -> frozenset[PeerId]:
    """The peers that are not banned and have called the coordinator, or are in one of the last plans."""
    placed = {
        member.peer for plan in run_view.plans.values() for each in plan.replicas for member in each.members
    }
    return frozenset(run_view.sources.keys() | placed | run_view.followers.keys()) - run_view.banned


class AcceptedSources:
    """The members' sources, the coordinator's, and this machine's private networks.

    The members of one home appear to the coordinator under their public address, but to each other under
    private ones.
    """

    def __init__(self) -> None:
        self._coordinator: frozenset[str] = frozenset()
        self._known: Mapping[PeerId, Set[str]] = {}

    async def resolve_coordinator(self, api: str, dht_peers: Iterable[str]) -> None:
        """Find the coordinator's addresses behind ``host:port`` and multiaddresses.

        Names that do not resolve now leave what was found before.
        """
        hosts = {split_endpoint(api)[0], *(place[0] for place in map(tcp_place, dht_peers) if place)}
        found: set[str] = set()
        for host in hosts:
            try:
                found |= await _sources_of(host)
            except OSError as error:
                log.debug("%s does not resolve now: %s", host, error)
                found |= self._coordinator
        self._coordinator = frozenset(found)

    def moved(self, run_view: RunView) -> frozenset[PeerId]:
        """The peers that have called from another source since the last call of this."""
        before, self._known = self._known, {peer: set(each) for peer, each in run_view.sources.items()}
        return frozenset(peer for peer, now in self._known.items() if peer in before and now - before[peer])

    def of(self, run_view: RunView) -> frozenset[str]:
        return self.of_members(run_view) | set(private_networks())

    def of_members(self, run_view: RunView) -> frozenset[str]:
        """Those of the members and of the coordinator alone."""
        return member_sources(run_view) | self._coordinator


async def _sources_of(host: str) -> set[str]:
    if own := source_of_host(host):
        return {own}
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {source_of_host(str(address[0])) for *_, address in found} - {""}
