"""A node whose coordinator does not answer looks elsewhere: at addresses it was told, and in the DHT."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from node.exchange.transport import Transport
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.joining import answering_address
from node.net.membership import Membership
from protocol.errors import HetnodeError
from protocol.server.backoff import pause_after

log = logging.getLogger(__name__)

LOOK_SECONDS, LONGEST_SECONDS = 15.0, 300.0
LOOK_TOLD_SECONDS, LONGEST_TOLD_SECONDS = 5.0, 30.0
"""Where the coordinator has told of a standby: to look there is one call, and its operator may be slow."""
_LOOKS_A_SEARCH = 10
_TRY_SECONDS = 20.0


async def follow_coordinator(
    coordinator: CoordinatorClient,
    membership: Membership,
    directory: Directory | None = None,
    transport: Transport | None = None,
) -> NoReturn:
    """Go on where the coordinator is, if it does not answer at the known address.

    What was told and the DHT only propose: the run's authority proves who answers, and the known address is
    tried first. Nodes begin at different times, so they do not all look at the same moment. A coordinator
    that has taken the run over has another peer in the DHT, which `transport` then enters through it. A relay
    is not in the DHT.
    """
    looks, left = 0, None
    while True:
        told = (LOOK_TOLD_SECONDS, LONGEST_TOLD_SECONDS) if coordinator.credentials.others else ()
        await asyncio.sleep(pause_after(looks + 1, *(told or (LOOK_SECONDS, LONGEST_SECONDS))))
        if left is not None and transport is not None and coordinator.dht_peers not in ((), left):
            left = None
            await transport.restart()
        looks = looks + 1 if membership.away else 0
        known, published = coordinator.credentials, coordinator.credentials.api
        if looks and directory is not None and (not told or looks % _LOOKS_A_SEARCH == 1):
            published = (await directory.endpoints()).get(known.coordinator, known.api)
        places = tuple(dict.fromkeys((known.api, *known.others * bool(looks), published)))
        if len(places) == 1:
            continue
        try:
            address = await answering_address(known, places, _TRY_SECONDS)
            if address != known.api:
                log.warning("the coordinator has moved from %s to %s", known.api, address)
                left = coordinator.dht_peers
                await coordinator.follow(address)
        except (HetnodeError, OSError) as error:
            level = logging.WARNING if looks == 1 else logging.DEBUG
            log.log(level, "the coordinator does not answer at %s either: %s", ", ".join(places[1:]), error)
