"""A process that accepts links and sends every frame back, with DESCRIPTORS as its limit of open files.

    python -m tests.support.link_acceptor DESCRIPTORS

The first line of standard input is JSON: authority, certificate and key, PEM. It prints its port, and ends
when standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import uvloop

from node.net.link import LinkLimits, LinkMember, LiveLink
from node.net.link_server import LinkServer
from node.security.credentials import Credentials
from protocol.errors import HetnodeError
from protocol.types import FrameId, FrameKind, PeerId

UPPER, LOWER = (
    LinkMember("run", "hash", PeerId(name), 0, position) for position, name in enumerate(("upper", "lower"))
)
LIMITS = LinkLimits(frame_bytes=8 << 20, waiting_frames=4)
SECONDS = 60.0


def numbered(number: int, kind: FrameKind = FrameKind.FORWARD) -> FrameId:
    """The frames of a link are numbered from 0; they come back with another kind."""
    return FrameId(1, 1, 0, number, kind)


async def send_back(link: LiveLink) -> None:
    number = 0
    with suppress(HetnodeError):
        while True:
            frame = await link.take(numbered(number), SECONDS)
            Path(__file__).read_bytes()  # a node opens files all the time
            await link.send(replace(frame, id=numbered(number, FrameKind.BACKWARD)), SECONDS)
            number += 1


async def main(descriptors: int, shown: Credentials) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    server = LinkServer(lambda: shown)
    print(await server.start("127.0.0.1", 0), flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    echoing = set[asyncio.Task[None]]()
    while not ended.done():
        with suppress(HetnodeError):
            echoing.add(asyncio.create_task(send_back(await server.accept(LOWER, UPPER, LIMITS, 1.0))))
    await server.close()


if __name__ == "__main__":
    pems = json.loads(sys.stdin.readline())
    uvloop.run(main(int(sys.argv[1]), Credentials(**{name: pem.encode() for name, pem in pems.items()})))
