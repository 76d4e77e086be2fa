"""This machine's own address changes: a new lease, another network, a laptop that wakes up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from typing import NoReturn

from node.exchange.transport import Transport
from node.net.address_trial import call_over_both_versions
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.joining import local_address_towards
from node.net.membership import TEMPORARY, Membership, RunView, has_moved, until_answered
from node.net.reach import DirectReach
from protocol.errors import HetnodeError
from protocol.server.clock import steady
from protocol.server.interfaces import interface_addresses
from protocol.trust.reachability import Addresses
from protocol.types import PeerId

log = logging.getLogger(__name__)

wall_clock = steady  # goes on while this machine is suspended; the event loop's clock stands still
_POLL_SECONDS = 1.0
_SLEPT_SECONDS = 5.0
"""So much less than the wall clock shows that this machine was suspended."""
_EXPECTED_SECONDS = 30.0
_TELL_SECONDS, _RETRY_SECONDS = 8.0, 5.0


@dataclass(frozen=True)
class AddressChange:
    """What has changed, for people. `is_cut`: connections from before are dead.

    `is_here`: this machine itself has noticed it, and its connection to the coordinator is as old.
    """

    what: str
    is_cut: bool
    is_here: bool


class AddressWatch:
    """Notices that this machine has another address towards `coordinator`, or was suspended.

    Looks at the addresses of the interfaces every second.

    Attributes:
        address: towards the coordinator.
    """

    def __init__(self, coordinator: str, address: str) -> None:
        self._coordinator, self.address = coordinator, address
        self._seen, self._behind = interface_addresses(), self._behind_wall_clock()
        self._slept = False

    async def change(self) -> AddressChange:
        """Wait for the next change. A machine without any network is waited for."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            seen, behind = interface_addresses(), self._behind_wall_clock()
            self._slept |= behind > self._behind + _SLEPT_SECONDS
            self._behind = behind
            if seen == self._seen and not self._slept:
                continue
            try:
                address = await local_address_towards(self._coordinator)
            except HetnodeError as error:
                log.debug("%s", error)
                continue
            former, self.address, self._seen = self.address, address, seen
            slept, self._slept = self._slept, False
            is_cut = slept or former not in {str(each.ip) for each in seen}
            if address != former:
                return AddressChange(f"this machine is at {address} now", is_cut, is_here=True)
            if slept:
                return AddressChange("this machine was suspended", is_cut, is_here=True)

    @staticmethod
    def _behind_wall_clock() -> float:
        return wall_clock() - asyncio.get_running_loop().time()


class SourceWatch:
    """Notices that calls of peer `me` arrive from another source: a router in between has another address."""

    def __init__(self, membership: Membership, me: PeerId) -> None:
        self._membership, self._me = membership, me
        self._known: set[str] = set()
        self._expected_until = -inf

    def expect_another(self) -> None:
        """This machine has moved, so another source in the next seconds is no news."""
        self._expected_until = asyncio.get_running_loop().time() + _EXPECTED_SECONDS

    async def change(self) -> AddressChange:
        """Wait for the next change."""
        while True:
            found = await self._membership.until(self._unknown)
            is_expected = asyncio.get_running_loop().time() <= self._expected_until
            is_news = has_moved(self._known, found) and not is_expected
            self._known |= found
            if is_news:
                what = f"the coordinator sees this node at {', '.join(sorted(found))} now"
                return AddressChange(what, is_cut=True, is_here=False)

    def _unknown(self, run_view: RunView) -> Set[str] | None:
        return set(run_view.sources.get(self._me, ())) - self._known or None


class OwnAddress:
    """Makes the node `me` reachable again after its address has changed.

    Args:
        reach: has the ports that claim the node's addresses, and takes a relay if they are not reached.
        here: its address towards the coordinator.
        claim: lets these ports claim the node's addresses anew, given its address towards the coordinator.

    Attributes:
        has_moved: connections of this node were lost by a change, at least once.
    """

    def __init__(
        self,
        me: PeerId,
        coordinator: CoordinatorClient,
        membership: Membership,
        reach: DirectReach,
        here: str,
        claim: Callable[[str], Awaitable[None]],
    ) -> None:
        self._me, self._coordinator, self._membership = me, coordinator, membership
        self._reach, self._claim = reach, claim
        self._here, self._outside = AddressWatch(coordinator.address, here), SourceWatch(membership, me)
        self.has_moved = False

    async def keep(self, transport: Transport, directory: Directory) -> NoReturn:
        """Follow each change, until cancelled: new connections, and all others are told where to dial."""
        async with AsyncExitStack() as stack:
            while True:
                showing = asyncio.create_task(self._show_sources())
                stack.callback(showing.cancel)
                change = await self._change()
                await stack.aclose()
                log.warning("%s", change.what)
                if change.is_here:
                    self._outside.expect_another()
                    if change.is_cut:
                        await self._coordinator.reconnect()
                telling = asyncio.create_task(self._tell())
                stack.callback(telling.cancel)
                # Before the links end: else the next plan could name the former address.
                _, late = await asyncio.wait({telling}, timeout=_TELL_SECONDS)
                if change.is_cut:
                    self.has_moved = True
                    await self._membership.note_move()
                    await transport.restart()
                announcing = transport if change.is_cut and late else None
                publishing = asyncio.create_task(self._publish(telling, directory, announcing))
                stack.callback(publishing.cancel)

    async def _show_sources(self) -> None:
        coordinator = self._coordinator
        await call_over_both_versions(coordinator.address, coordinator.credentials.tls, self._me)

    async def _change(self) -> AddressChange:
        """The next change, noticed by this node or by the coordinator."""
        waiting = [asyncio.create_task(each.change()) for each in (self._here, self._outside)]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for each in waiting:
                each.cancel()

    async def _tell(self) -> None:
        """Tell the coordinator where this node is reached by now. A node that only dials need not.

        A node that is not reached any more takes a relay, before its DHT peer starts again.
        """
        ports = self._reach.ports
        if ports.addresses.relayed or ports.addresses == Addresses():
            return
        await self._claim(self._here.address)

        async def tell() -> None:
            ports.note_reached(await self._coordinator.update_addresses(ports.addresses))
            await self._reach.take()

        def warn(error: HetnodeError) -> None:
            log.warning("the coordinator is not told of that address yet: %s", error)

        try:
            await until_answered(tell, _RETRY_SECONDS, warn, TEMPORARY)
        except HetnodeError as error:
            warn(error)  # the next join tells it

    async def _publish(
        self, telling: asyncio.Task[None], directory: Directory, announcing: Transport | None
    ) -> None:
        """Publish what is told. `announcing` started again before that, and announces the former address."""
        await telling
        if announcing is not None:
            await announcing.restart()
        await directory.move(self._reach.ports.endpoint, self._reach.ports.dht)
