"""What a node dials for the endpoint of a peer: addresses that a peer may have, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from node.net.link import LinkLimits, LinkMember
from node.net.link_dialer import dial
from node.net.peer_address import target_of
from node.net.probe import probe_peer
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId
from protocol.wire.framing import CHUNK_BYTES
from tests.support.certificates import credentials

LIMITS = LinkLimits(frame_bytes=8 * CHUNK_BYTES, waiting_frames=4)
UPPER = LinkMember("run", "hash", PeerId("upper"), 0, 0)
LOWER = LinkMember("run", "hash", PeerId("lower"), 0, 1)


def resolving(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    """The resolver of this machine knows exactly `names`, each with its addresses."""

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        family = {
            address: socket.AF_INET6 if ":" in address else socket.AF_INET for address in names[host].split()
        }
        return [(family[each], socket.SOCK_STREAM, 6, "", (each, port)) for each in names[host].split()]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)


async def test_addresses_are_dialled_as_they_are() -> None:
    assert await target_of("127.0.0.1:7700", "p") == "ipv4:127.0.0.1:7700"
    assert await target_of("[::1]:7700", "p") == "ipv6:[::1]:7700"


async def test_a_name_is_dialled_at_the_addresses_that_were_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(
        monkeypatch, both="10.0.0.1 10.0.0.2 fd12::1", v6="fe80::1 fd12::1 fd12::2", bad="169.254.169.254"
    )
    assert await target_of("both:7", "p") == "ipv4:10.0.0.1:7,10.0.0.2:7"
    # A machine of a local network may have a link-local address beside its own.
    assert await target_of("v6:7", "p") == "ipv6:[fd12::1]:7,[fd12::2]:7"
    with pytest.raises(HetnodeError, match=r"bad:7 of p is not dialled: 169\.254\.169\.254 is the addr"):
        await target_of("bad:7", "p")
    with pytest.raises(OSError, match="Name or service"):
        await target_of("unknown:7", "p")


@pytest.mark.parametrize(
    "endpoint",
    ["169.254.169.254:80", "2852039166:80", "unix:/run/x:1", "0.0.0.0:1", "[fe80::1]:1", "h:0", ""],
)
async def test_neither_a_link_nor_a_probe_dials_what_no_peer_may_have(endpoint: str) -> None:
    # At once: a minute of attempts would not help.
    async with asyncio.timeout(30):
        with pytest.raises(HetnodeError, match="is not dialled") as error:
            await dial(endpoint, UPPER, LOWER, LIMITS, 3600, credentials(UPPER.peer))
        assert error.value.code is ErrorCode.NEIGHBOUR_UNREACHABLE
        with pytest.raises(HetnodeError, match="is not dialled") as error:
            async with probe_peer(endpoint, LOWER.peer, credentials(UPPER.peer)):
                pass
        assert error.value.code is ErrorCode.NEIGHBOUR_UNREACHABLE


async def test_a_name_that_does_not_resolve_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch)
    with pytest.raises(HetnodeError, match=r"no answer from later:1 within 0 s \(.*Name or service") as error:
        await dial("later:1", UPPER, LOWER, LIMITS, 0.3, credentials(UPPER.peer))
    assert error.value.code is ErrorCode.NEIGHBOUR_UNREACHABLE
    with pytest.raises(HetnodeError, match=r"lower cannot be reached at later:1.*Name or service"):
        async with probe_peer("later:1", LOWER.peer, credentials(UPPER.peer)):
            pass
