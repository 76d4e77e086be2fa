"""The links from one member to its neighbours in a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from functools import partial

from node.core.train.services import Services
from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.link_dialer import dial
from node.net.link_handshake import unreachable
from node.net.membership import PeerAssignment
from protocol.errors import ErrorCode, HetnodeError, first_error
from protocol.math.microbatch_order import most_in_flight
from protocol.types import Dialer, PeerId, Replica
from protocol.wire.framing import frame_limit

log = logging.getLogger(__name__)


async def open_links(
    services: Services, assignment: PeerAssignment, round_number: int, stack: AsyncExitStack
) -> tuple[LiveLink | None, LiveLink | None]:
    """Open the links upstream and downstream at the same time; None at the ends of the chain.

    `stack` closes them. A link is also closed when its neighbour is banned or gives up, and when this machine
    gets another address.

    Raises HetnodeError: NEIGHBOUR_UNREACHABLE, also where a neighbour refuses; COORDINATOR_UNREACHABLE, ...
    """
    spec, replica, position = services.spec, assignment.replica, assignment.position
    members = replica.members
    endpoints = await services.directory.endpoints() if len(members) > 1 else {}
    # The first member may have to tokenize a corpus before it opens its link.
    seconds = spec.timing.link + spec.timing.match_window
    ahead = max(spec.inner.microbatches, most_in_flight(len(members)))
    limits = LinkLimits(frame_limit(spec), 2 * ahead + 4)

    def end_at(at: int) -> LinkMember:
        peer, epoch = members[at].peer, assignment.plan.epoch_of_links(replica, round_number)
        return LinkMember(services.run, spec.hash, peer, replica.index, at, epoch, round_number)

    def report(neighbour: PeerId, address: str, why: str) -> None:
        log.warning("the link to %s at %s cannot be opened yet: %s", neighbour, address, why)
        call = services.coordinator.report_link(assignment.plan.epoch, neighbour, address, why)
        stack.callback(asyncio.create_task(_suppressed(call), name="report-link").cancel)

    async def connect(other: int) -> LiveLink | None:
        if not 0 <= other < len(members):
            return None
        here, there = end_at(position), end_at(other)
        upstream_dials = replica.links[min(position, other)].dialer is Dialer.UPSTREAM
        if upstream_dials == (position < other):
            # The plan has the address of the member's last join; a DHT record may be older.
            address = members[other].endpoint or endpoints.get(there.peer, "")
            shown, received = services.coordinator.credentials.tls, services.membership.estimates.received
            line, on_silence = services.link_server.line, partial(report, there.peer, address)
            place = await services.through(address)
            try:
                link = await dial(place, here, there, limits, seconds, shown, received, line, on_silence)
            except HetnodeError as error:
                if error.code is ErrorCode.NEIGHBOUR_UNREACHABLE:
                    raise
                # What a neighbour answers ends the link, and never this node.
                raise unreachable(there, f"{error.code.label}: {error.cause}") from error
        else:
            link = await services.link_server.accept(here, there, limits, seconds)
        stack.push_async_callback(link.close)
        watch = asyncio.create_task(_close_when_over(link, services), name=f"link-{other}")
        stack.callback(watch.cancel)
        log.info("link to position %d of %s is open", other, replica.name)
        return link

    try:
        async with asyncio.TaskGroup() as group:  # no link stays of which the other one has failed
            upstream, downstream = (group.create_task(connect(position + each)) for each in (-1, 1))
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    return upstream.result(), downstream.result()


def have_same_links(one: Replica, other: Replica) -> bool:
    """Whether two replicas have the same chain of members and the same dialers: their links can stay open."""
    dialers = [[link.dialer for link in replica.links] for replica in (one, other)]
    return one.members == other.members and dialers[0] == dialers[1]


async def _suppressed(call: Awaitable[None]) -> None:
    """The coordinator learns of the link later, when this replica retreats."""
    with suppress(HetnodeError):
        await call


async def _close_when_over(link: LiveLink, services: Services) -> None:
    await link.close(await services.membership.link_over(link.neighbour.peer))
