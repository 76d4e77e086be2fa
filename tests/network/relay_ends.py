"""The processes of the relay's tests in namespaces: ``python -m tests.network.relay_ends FOLDER ROLE ...``.

    relay LISTEN PORTS            a relay, with the certificate of "relay"
    home RELAY PEER               a node behind it: it accepts one link after the other, and tells how many
                                  seconds lay between the first and the last frame
    caller ADDRESS PEER           opens a link to that node, and sends FRAMES frames

FOLDER holds the certificates: see :func:`write_credentials`. Each prints what it has to tell as JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from node.home.relay.agent import RelayAgent
from node.net.link import LinkEndpoint, LinkLimits
from node.net.link_dialer import dial
from node.net.link_server import LinkServer
from node.security.channels import server_tls
from node.security.credentials import Credentials
from protocol.errors import HetnodeError
from protocol.relay.exposed import RelayedService
from protocol.relay.server import RelayServer
from protocol.server.gateway import Gateway, listen_on
from protocol.types import DType, Frame, FrameId, FrameKind, PeerId, RelayAddress, TensorHeader
from tests.support.certificates import authority, credentials

RELAY, CALLER = "relay", "caller"
FRAME_BYTES, FRAMES = 1 << 20, 16
_LIMITS = LinkLimits(frame_bytes=2 * FRAME_BYTES, waiting_frames=8)
_FILES = ("authority.pem", "certificate.pem", "key.pem")


def write_credentials(folder: Path, *peers: str) -> None:
    """Certificates of one authority, for each of `peers`."""
    issuer = authority("network")
    for peer in peers:
        own = credentials(peer, issuer)
        (folder / peer).mkdir(parents=True)
        for name, data in zip(_FILES, (own.authority, own.certificate, own.key), strict=True):
            (folder / peer / name).write_bytes(data)


def _read(folder: Path, peer: str) -> Credentials:
    return Credentials(*((folder / peer / name).read_bytes() for name in _FILES))


def _ends(peer: str) -> tuple[LinkEndpoint, LinkEndpoint]:
    """Of the link from the caller to `peer`."""
    return (
        LinkEndpoint("run", "hash", PeerId(CALLER), 0, 0),
        LinkEndpoint("run", "hash", PeerId(peer), 0, 1),
    )


def _frame(number: int) -> Frame:
    header = (TensorHeader("t", DType.U8, (FRAME_BYTES,)),)
    return Frame(FrameId(1, 1, 0, number, FrameKind.FORWARD), header, bytes([number % 256]) * FRAME_BYTES)


def _tell(**news: object) -> None:
    print(json.dumps(news), flush=True)


async def _relay(folder: Path, listen: str, ports: str) -> None:
    host, _, port = listen.rpartition(":")
    first, last = map(int, ports.split("-"))
    own = _read(folder, RELAY)
    gateway = Gateway(listen_on(host, int(port)))
    relay = RelayServer(gateway, PeerId(RELAY), lambda: server_tls(own), range(first, last + 1))
    await relay.start()
    _tell(ready=relay.port)
    await asyncio.Event().wait()


async def _home(folder: Path, relay: str, peer: str) -> None:
    own = _read(folder, peer)
    server = LinkServer(lambda: own)
    local = ("127.0.0.1", await server.start("127.0.0.1", 0))
    servers = {service: lambda: local for service in RelayedService}
    agent = RelayAgent(RelayAddress(PeerId(RELAY), relay), PeerId(peer), lambda: own, servers)
    keeping = asyncio.create_task(agent.keep())
    telling = asyncio.create_task(_tell_ports(agent))
    caller, here = _ends(peer)
    while not keeping.done() and not telling.done():
        with suppress(HetnodeError):  # no caller has come yet
            link = await server.accept(here, caller, _LIMITS, 10)
            arrived = []
            for number in range(FRAMES):
                frame = _frame(number)
                assert await link.take(frame.id, 60) == frame
                arrived.append(time.monotonic())
            _tell(seconds=arrived[-1] - arrived[0])
            await link.part(60)
    keeping.result()


async def _tell_ports(agent: RelayAgent) -> None:
    """Each time that the relay is there."""
    while True:
        _tell(dht_port=await agent.connected())
        while True:
            await asyncio.sleep(0.05)
            if agent.away:
                break


async def _caller(folder: Path, address: str, peer: str) -> None:
    own, (here, neighbour) = _read(folder, CALLER), _ends(peer)
    began = time.monotonic()
    link = await dial(address, here, neighbour, _LIMITS, 30, own)
    _tell(opened=time.monotonic() - began)
    for number in range(FRAMES):
        await link.send(_frame(number), 60)
    await link.part(60)


if __name__ == "__main__":
    _, base, role, *arguments = sys.argv
    main = {"relay": _relay, "home": _home, "caller": _caller}[role]
    asyncio.run(main(Path(base), *arguments))
