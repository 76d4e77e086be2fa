"""A node whose coordinator does not answer looks in the DHT for another address of it."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.joining import answering_address
from node.net.membership import Membership
from protocol.errors import HetnodeError
from protocol.server.backoff import pause_after

log = logging.getLogger(__name__)

LOOK_SECONDS, LONGEST_SECONDS = 15.0, 300.0
_TRY_SECONDS = 20.0


async def follow_coordinator(
    coordinator: CoordinatorClient, membership: Membership, directory: Directory
) -> NoReturn:
    """Go on at the address that the coordinator publishes, if it does not answer at the known one.

    The DHT only proposes: the run's authority proves who answers, and the known address is tried first. Nodes
    begin at different times, so they do not all look at the same moment.
    """
    looks = 0
    while True:
        await asyncio.sleep(pause_after(looks + 1, LOOK_SECONDS, LONGEST_SECONDS))
        looks = looks + 1 if membership.away else 0
        known = coordinator.credentials
        found = (await directory.endpoints()).get(known.coordinator, known.api) if looks else known.api
        if found == known.api:
            continue
        try:
            address = await answering_address(known, (known.api, found), _TRY_SECONDS)
            if address != known.api:
                log.warning("the coordinator has moved from %s to %s", known.api, address)
                await coordinator.follow(address)
        except (HetnodeError, OSError) as error:
            log.warning("the coordinator is said to be at %s, and cannot be followed yet: %s", found, error)
