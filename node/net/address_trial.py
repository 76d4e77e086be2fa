"""Asks the coordinator whether it reaches this machine, and from where it sees this machine's calls come."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from node.net.coordinator_channel import CoordinatorChannel
from node.security.credentials import Credentials
from protocol.pb import hetnode_pb2 as pb
from protocol.server.limits import source_of_host
from protocol.trust.endpoints import split_endpoint
from protocol.trust.reachability import DIAL_BACK_SECONDS, Addresses, Reached
from protocol.types import RelayAddress
from protocol.wire.convert.plans import addresses_to_pb, reached_from_pb, relays_from_pb

_CALL_SECONDS = 10.0

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


def _connections_to(coordinator: str) -> set[Place]:
    """The local ends of this process's connections to `coordinator`."""
    _, port = split_endpoint(coordinator)
    connections = psutil.Process().net_connections("tcp")
    return {
        (source_of_host(each.laddr.ip), int(each.laddr.port))
        for each in connections
        if each.raddr and each.raddr.port == port
    }
