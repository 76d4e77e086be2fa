"""Publishes this node's record in the DHT, and looks up the records of other peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from node.exchange.transport import Transport
from node.net.live_estimates import LiveEstimates
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.types import PeerId, StageRange

log = logging.getLogger(__name__)

# Lifetime of a record. Publishing costs as many bytes as a small payload, and helps only peers that do not
# find this node in the plan. So it happens rarely, and at once after a change.
_RECORD_SECONDS = 900.0


class Directory:
    """Keeps this node's record in the DHT while :meth:`keep` runs, and looks up the records of neighbours.

    Each record contains the newest capacity of `estimates`. A DHT that is out of reach for some time is
    normal; it is only logged.
    """

    def __init__(
        self, transport: Transport, record: PeerRecord, estimates: LiveEstimates | None = None
    ) -> None:
        self._transport, self._record, self._estimates = transport, record, estimates

    async def keep(self) -> NoReturn:
        """Publish the record until cancelled, three times in its lifetime."""
        while True:
            await self._publish()
            await asyncio.sleep(_RECORD_SECONDS / 3)  # two attempts may fail before the record expires

    async def move(self, endpoint: str, dht: str) -> None:
        """Publish where others open links to this node from now on, and where its DHT peer is."""
        self._record = replace(self._record, endpoint=endpoint, dht=dht)
        await self._publish()

    async def take_stages(self, stages: StageRange) -> None:
        """Publish which stages this node now hosts."""
        self._record = replace(self._record, stages=stages)
        await self._publish()

    async def endpoints(self) -> Mapping[str, str]:
        """host:port by peer id, from the records of the peers; empty if the DHT does not answer."""
        return {peer: record.endpoint for peer, record in (await self._records()).items() if record.endpoint}

    async def dht_addresses(self) -> Mapping[str, str]:
        """host:port of the DHT peers of others; empty if the DHT does not answer."""
        return {peer: record.dht for peer, record in (await self._records()).items() if record.dht}

    async def _records(self) -> Mapping[PeerId, PeerRecord]:
        try:
            return await self._transport.lookup()
        except HetnodeError as error:
            log.warning("no records from the DHT, using the plan's endpoints: %s", error)
            return {}

    async def _publish(self) -> None:
        if self._estimates is not None:
            self._record = replace(self._record, capacity=self._estimates.capacity)
        try:
            await self._transport.publish(self._record, _RECORD_SECONDS)
        except HetnodeError as error:
            if error.code is not ErrorCode.DHT_UNREACHABLE:
                raise
            log.warning("%s", error)
