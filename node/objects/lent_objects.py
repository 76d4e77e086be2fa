"""Asks the coordinator for URLs of its object store, and uploads parts of checkpoints that it wants there."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn, TypeVar

from node.checkpoint import parts
from node.checkpoint.download import TransferError
from node.exchange.object_client import ObjectClient
from node.exchange.object_parts import segment_of, segments
from node.exchange.object_source import LentPart, LentPayloads, ObjectSource
from node.net.coordinator_client import CoordinatorClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.line import Line
from protocol.trust.host_port import split_host_port
from protocol.types import ExchangeGroup, Part, PayloadDescriptor, StateRecord
from protocol.wire.object_calls import (
    MOST_ASKED,
    AskUploads,
    LendPart,
    LendPayloads,
    LendSegment,
    WantedUpload,
    distance,
)
from protocol.wire.typed_calls import Request

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_ASK_SECONDS = 3.0
_LOOK_SECONDS = 20.0
_FORGET_SECONDS = 600.0
"""So long a coordinator without a store is not asked again: it may be restarted with one."""
_RETRY_SECONDS = 5.0


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

    async def of_part(self, record: StateRecord) -> LentPart | None:
        if record.part not in (Part.STAGE, Part.EMBEDDING):
            return None
        urls = await self.ask(LendPart(WantedUpload(record.stage, record.part, record.round_number)))
        return LentPart(urls, await self.nearest()) if urls else None

    async def keep_uploading(self, folder: Path, line: Line) -> NoReturn:
        """Upload what is wanted of the checkpoints of the node in `folder`, in segments. Never raises."""
        client, done = ObjectClient(line), set[WantedUpload]()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            wanted = await self.ask(AskUploads()) or ()
            for each in wanted:
                try:
                    if each not in done and await self._upload(client, folder / "checkpoint", each):
                        done.add(each)
                        log.info("the store has %s %d of round %d", each.part, each.stage, each.round_number)
                except (TransferError, OSError) as error:
                    log.info("%s %d is not in the store yet: %s", each.part, each.stage, error)

    async def _upload(self, client: ObjectClient, folder: Path, wanted: WantedUpload) -> bool:
        """Whether the store has the part now. Raises TransferError; OSError."""
        part = await asyncio.to_thread(parts.find, folder, wanted.stage, wanted.part, wanted.round_number)
        if part is None:
            return False
        hashes, nearest = await asyncio.to_thread(parts.chunk_hashes, part), await self.nearest()
        ranges = list(segments(part.nbytes))
        for index, each in enumerate(ranges):
            data = await asyncio.to_thread(segment_of, part, hashes, each)
            sha256 = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
            if not (url := await self.ask(LendSegment(wanted, index, len(ranges), len(data), sha256))):
                return False
            await client.put(url, data, sha256, nearest)
        return True

    async def _lent(self, about: PayloadDescriptor, sha256s: list[str]) -> LentPayloads | None:
        wanted = tuple(sha256s[:MOST_ASKED])
        urls = await self.ask(LendPayloads(about.stage, about.round_number, wanted))
        if urls is None:
            return None
        if len(urls.gets) != len(wanted):
            log.warning("the coordinator lends %d objects of %d", len(urls.gets), len(wanted))
            return None
        return LentPayloads(wanted, urls, await self.nearest())

    async def ask(self, request: Request[Answer | None]) -> Answer | None:
        """The answer; None without one, and without a store."""
        found = None
        if time.monotonic() < self._none_until:
            return found
        try:
            answer = await self._coordinator.ask(request, _ASK_SECONDS)
        except HetnodeError as error:
            log.debug("the coordinator lends nothing: %s", error)
            # BAD_REQUEST is of a version without stores. One that is away must not delay what follows.
            lasts = _FORGET_SECONDS if error.code is ErrorCode.BAD_REQUEST else _RETRY_SECONDS
        else:
            lasts = _FORGET_SECONDS if answer is None else 0.0
            found = answer
        self._none_until = time.monotonic() + lasts
        return found

    async def nearest(self) -> int:
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
