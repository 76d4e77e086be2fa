"""Asks the coordinator whether it reaches this machine, and from where it sees this machine's calls come."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

import psutil

from node.net.coordinator_channel import CoordinatorChannel
from node.security.credentials import Credentials
from protocol.errors import HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.server.limits import source_of_host
from protocol.trust.endpoints import split_endpoint
from protocol.trust.host_port import host_port
from protocol.trust.reachability import DIAL_BACK_SECONDS, Addresses, Reached
from protocol.types import RelayAddress
from protocol.wire.convert.plans import addresses_to_pb, reached_from_pb, relays_from_pb

log = logging.getLogger(__name__)

_CALL_SECONDS = 10.0
_VERSION_SECONDS = 5.0

Place = tuple[str, int]
"""IPv4 address or IPv6 /64, and a port."""


@dataclass(frozen=True)
class AddressTrial:
    """What the coordinator answered.

    Attributes:
        local: where the call came from, as this machine sees it; "" and 0 if that is not known.
        seen: the same, as the coordinator sees it.
    """

    reached: Reached
    relays: tuple[RelayAddress, ...]
    local: Place
    seen: Place


async def try_addresses(coordinator: str, tls: Credentials, peer: str, addresses: Addresses) -> AddressTrial:
    """Let the coordinator dial `addresses`, over a new connection. It records nothing.

    Raises as :meth:`CoordinatorChannel.error_of`, also where the coordinator does not know this call.
    """
    before = _connections_to(coordinator)
    request = pb.TryAddressesRequest(peer=peer, addresses=addresses_to_pb(addresses))
    async with CoordinatorChannel(coordinator, tls) as channel, channel.call() as stub:
        reply: pb.TryAddressesReply = await stub.TryAddresses(
            request, timeout=_CALL_SECONDS + DIAL_BACK_SECONDS
        )
        new = _connections_to(coordinator) - before
    local = new.pop() if len(new) == 1 else ("", 0)
    return AddressTrial(
        reached_from_pb(reply.reached), relays_from_pb(reply.relays), local, (reply.source, reply.source_port)
    )


async def call_over_both_versions(coordinator: str, tls: Credentials, peer: str) -> None:
    """Call the coordinator over IPv4 and IPv6, if it has both, so that it knows both sources of this machine.

    Other peers admit connections from known sources alone. A call that fails is only logged.
    """
    host, port = split_endpoint(coordinator)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.debug("%s does not resolve now: %s", host, error)
        return
    first = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    if len(first) < 2:
        return

    async def call(address: str) -> None:
        try:
            async with asyncio.timeout(_VERSION_SECONDS):
                await try_addresses(host_port(address, port), tls, peer, Addresses())
        except (HetnodeError, TimeoutError) as error:
            log.debug("the coordinator is not reached at %s: %s", address, error)

    await asyncio.gather(*map(call, first.values()))


def _connections_to(coordinator: str) -> set[Place]:
    """The local ends of this process's connections to `coordinator`."""
    _, port = split_endpoint(coordinator)
    connections = psutil.Process().net_connections("tcp")
    return {
        (source_of_host(each.laddr.ip), int(each.laddr.port))
        for each in connections
        if each.raddr and each.raddr.port == port
    }
