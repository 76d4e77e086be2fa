"""Where a relay connects to for the peers behind it."""

from __future__ import annotations

import pytest

from protocol.relay.destinations import Destinations
from protocol.relay.ports import ports_after

MEMBER, PRIVATE, CALLER = "44.10.0.2", "10.0.0.5", "44.10.0.101"
DESTINATIONS = Destinations(lambda: {MEMBER, PRIVATE, "127.0.0.1"}, {"127.0.0.1"}, {7701})


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        (f"{MEMBER}:7711", CALLER),
        (f"{MEMBER}:443", CALLER),
        (f"{PRIVATE}:7711", "10.0.0.6"),
        ("127.0.0.1:7701", CALLER),
        ("127.0.0.1:7801", CALLER),
    ],
)
async def test_members_and_the_ports_of_the_relay_are_dialled(address: str, caller: str) -> None:
    host, _, port = address.rpartition(":")
    assert await DESTINATIONS.place(address, caller, {7801}) == (host, int(port))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("44.10.0.3:7711", "no member"),
        (f"{MEMBER}:22", "ports below 1024"),
        (f"{PRIVATE}:7711", "private network"),
        ("127.0.0.1:6379", "own machine"),
        ("127.0.0.2:7711", "own machine"),
        ("169.254.169.254:80", "metadata"),
        ("member.example:7711", "does not appear to be"),
        (f"{MEMBER}:0", "port 0"),
        ("", "is not host:port"),
        ("[::1", "is not host:port"),
    ],
)
async def test_no_other_machine_is_dialled(address: str, why: str) -> None:
    with pytest.raises(ConnectionRefusedError, match=why):
        await DESTINATIONS.place(address, CALLER, {7801})


def test_a_relay_below_port_1024_has_dht_ports_that_are_dialled() -> None:
    assert ports_after(443) == range(7801, 7901)
    assert ports_after(7702) == range(7703, 7803)
    assert ports_after(65530).stop == 65536
