"""The ports that a coordinator opens."""

from __future__ import annotations

from contextlib import AsyncExitStack

from coordinator.api.public_ports import ListenAddresses, RelayOptions, open_ports
from coordinator.ops.relay.own_relay import open_relay
from protocol.types import PeerId
from tests.support.ports import free_port


async def test_the_relay_leaves_its_port_to_the_dht_peer_that_starts_later() -> None:
    async with AsyncExitStack() as stack:
        enrollment = free_port()
        at = f"127.0.0.1:{enrollment}"
        addresses = ListenAddresses(
            f"127.0.0.1:{free_port()}", at, relay=RelayOptions(), dht_port=enrollment + 1
        )
        relay = open_relay(addresses, open_ports(addresses, stack), PeerId("me"), stack)
        assert relay is not None
        assert relay.address.endpoint != f"127.0.0.1:{enrollment + 1}"
