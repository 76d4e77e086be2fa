"""Asks the coordinator for URLs of its object store, and remembers for a while that it has none."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from ipaddress import ip_address
from typing import TypeVar

from node.exchange.object_source import LentPayloads, ObjectSource
from node.net.coordinator_client import CoordinatorClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.host_port import split_host_port
from protocol.types import ExchangeGroup, PayloadDescriptor
from protocol.wire.object_calls import MOST_ASKED, LendPayloads, distance
from protocol.wire.typed_calls import Request

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_ASK_SECONDS = 3.0
_FORGET_SECONDS = 600.0
"""So long a coordinator without a store is not asked again: it may be restarted with one."""


class LentObjects(ObjectSource):
    """What the coordinator lends this node of its store. Belongs to one event loop."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._none_until = 0.0

    async def of_exchange(self, own: PayloadDescriptor, group: ExchangeGroup) -> LentPayloads | None:
        others = [each.sha256 for each in group.descriptors if each != own]
        if own not in group.descriptors or not others:
            return None
        return await self._lent(own, others)

    async def of_payload(self, wanted: PayloadDescriptor) -> LentPayloads | None:
        return await self._lent(wanted, [wanted.sha256])

    async def _lent(self, about: PayloadDescriptor, sha256s: list[str]) -> LentPayloads | None:
        wanted = tuple(sha256s[:MOST_ASKED])
        urls = await self._ask(LendPayloads(about.stage, about.round_number, wanted))
        if urls is None:
            return None
        if len(urls.gets) != len(wanted):
            log.warning("the coordinator lends %d objects of %d", len(urls.gets), len(wanted))
            return None
        return LentPayloads(wanted, urls, await self._nearest())

    async def _ask(self, request: Request[Answer | None]) -> Answer | None:
        """The answer; None without one, and without a store."""
        if time.monotonic() < self._none_until:
            return None
        try:
            answer = await self._coordinator.ask(request, _ASK_SECONDS)
        except HetnodeError as error:
            log.debug("the coordinator lends nothing: %s", error)
            if error.code is not ErrorCode.BAD_REQUEST:  # that is of a version without stores
                return None
            answer = None
        if answer is None:
            self._none_until = time.monotonic() + _FORGET_SECONDS
        return answer

    async def _nearest(self) -> int:
        """The distance of the coordinator, which may lead this node to nothing that is nearer.

        0, the internet, if its address is not known.
        """
        host = split_host_port(self._coordinator.address)[0]
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            return 0
        places = (distance(ip_address(str(each[4][0]).partition("%")[0])) for each in found)
        return max((place for place in places if place is not None), default=0)
