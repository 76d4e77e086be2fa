"""Takes part in a run as a relay: a member without a stage, which carries connections of others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import NoReturn

from node.folder import remember_finished
from node.measure.hardware import available_threads, measure_capacity
from node.measure.measure import measure_coordinator
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.joining import (
    join_run,
    leave_run,
    local_address_towards,
    obtain_credentials,
    wanted_name,
)
from node.net.live_estimates import LiveEstimates
from node.net.membership import Membership, RunView
from node.net.moved_coordinator import follow_coordinator
from node.net.sources import AcceptedSources
from node.net.waiting import CoordinatorWait
from node.security.channels import server_tls
from node.security.identity import Identity
from protocol.relay.destinations import Destinations
from protocol.relay.ports import ports_after
from protocol.relay.server import RelayLimits, RelayServer
from protocol.server.descriptors import raise_descriptor_limit
from protocol.server.gateway import Gateway
from protocol.server.listening import listen_for
from protocol.trust.host_port import host_port
from protocol.trust.invite import Invite
from protocol.trust.reachability import Addresses
from protocol.types import PeerId, Role

log = logging.getLogger(__name__)

_JOIN_SECONDS = 15.0


@dataclass(frozen=True)
class RelayMemberOptions:
    """What a relay chooses for itself.

    With `invite`, it enrols first; otherwise it has credentials for `run` from before. `advertise` None takes
    the address that this machine uses towards the coordinator. `dht_ports` None takes
    :func:`ports_after` the relay's own. `name` is public; None takes the last choice, "" is none.
    """

    invite: Invite | None
    run: str
    listen_host: str = "::"
    listen_port: int = 7800
    advertise: str | None = None
    dht_ports: range | None = None
    limits: RelayLimits = field(default_factory=RelayLimits)
    join_seconds: float | None = None
    name: str | None = None


async def run_relay(options: RelayMemberOptions, identity: Identity) -> None:
    """Join the run as a relay, and carry connections until the run is finished or this is cancelled.

    Raises HetnodeError: PORT_IN_USE, BAD_ADDRESS; BAD_REQUEST if the invite is for another role; what joining
    raises.
    """
    raise_descriptor_limit()
    async with AsyncExitStack() as stack:
        wait = CoordinatorWait(options.join_seconds)
        credentials = await obtain_credentials(options.invite, options.run, identity, wait, relays=True)
        coordinator = CoordinatorClient(credentials, identity)
        stack.push_async_callback(coordinator.close)
        members: set[str] = set()
        relay = _relay_server(options, identity.peer, coordinator, members)
        stack.push_async_callback(relay.stop)
        await relay.start()
        host = options.advertise or await _local_address(credentials.api, wait)
        endpoint = host_port(host, relay.port)
        estimates = LiveEstimates(measure_capacity("cpu", available_threads()))

        name = wanted_name(options.name, credentials)
        joined: Admission

        async def join(seconds: float = _JOIN_SECONDS) -> float:
            nonlocal joined
            capacity = estimates.capacity
            me = Role.RELAY, capacity, Addresses(endpoint), ""
            joined = await join_run(coordinator, *me, seconds, name)
            return joined.spec.timing.heartbeat

        heartbeat = await wait.answer(join)
        stack.push_async_callback(leave_run, coordinator, "the relay has ended")
        estimates.joined()
        credentials.remember(Role.RELAY, name)
        remember_finished(credentials.folder, False)
        log.info("relay of run %s at %s, peer %s", credentials.run, endpoint, identity.peer)
        membership = Membership(coordinator, join, heartbeat, estimates)
        background = [
            asyncio.create_task(membership.keep()),
            asyncio.create_task(coordinator.keep_renewed()),
            asyncio.create_task(_keep_refusing(membership, relay)),
            asyncio.create_task(follow_coordinator(coordinator, membership)),
            asyncio.create_task(_keep_sources(membership, coordinator, joined.dht_peers, members)),
            asyncio.create_task(membership.until(lambda view: True if view.finished else None)),
        ]
        # Not before the join: nodes may wait for a relay. The next heartbeat tells the result.
        measuring = asyncio.create_task(measure_coordinator(coordinator, estimates))
        try:
            done, _ = await asyncio.wait(background, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for each in (*background, measuring):
                each.cancel()
        remember_finished(credentials.folder, True)
        log.info("the run is finished")


async def _local_address(coordinator: str, wait: CoordinatorWait) -> str:
    return await wait.answer(lambda _: local_address_towards(coordinator))


def _relay_server(
    options: RelayMemberOptions, peer: PeerId, coordinator: CoordinatorClient, members: Set[str]
) -> RelayServer:
    at = host_port(options.listen_host, options.listen_port)
    listener = listen_for("the relay", "--listen", at, "[::]:7800")
    ports = options.dht_ports or ports_after(int(listener.getsockname()[1]))
    gateway = Gateway(listener, options.limits.connections)
    hosts = (options.advertise,) if options.advertise else ()
    return RelayServer(
        gateway,
        peer,
        lambda: server_tls(coordinator.credentials.tls),
        ports,
        options.limits,
        destinations=Destinations(lambda: members, hosts),
    )


async def _keep_refusing(membership: Membership, relay: RelayServer) -> NoReturn:
    """End what the relay carries for peers that are banned from the run."""
    known: Set[PeerId] = frozenset()

    def changed(run_view: RunView) -> Set[PeerId] | None:
        return None if run_view.banned == known else run_view.banned

    while True:
        known = await membership.until(changed)
        relay.refuse(known)


async def _keep_sources(
    membership: Membership, coordinator: CoordinatorClient, dht_peers: Sequence[str], known: set[str]
) -> NoReturn:
    """Keep in `known` the sources of members and coordinator, to which the relay connects."""
    accepted = AcceptedSources()

    def changed(run_view: RunView) -> Set[str] | None:
        now, is_same_place = accepted.of_members(run_view), coordinator.credentials.api == api
        return None if now == known and is_same_place else now

    while True:
        api = coordinator.credentials.api
        await accepted.resolve_coordinator(api, coordinator.dht_peers or dht_peers)
        now = await membership.until(changed)
        known.clear()
        known.update(now)


def with_rate(limits: RelayLimits, bytes_per_second: float) -> RelayLimits:
    """`limits` with this rate for each node behind the relay."""
    return replace(limits, peer=replace(limits.peer, bytes_per_second=bytes_per_second))
