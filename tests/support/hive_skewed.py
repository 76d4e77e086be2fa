"""A node in a process of its own.

Its arguments are FOLDER CERTIFICATE AUTHORITY OFFSET PEER ADDRESS. Its test gives it a wrong clock; it takes
the coordinator's to be OFFSET seconds ahead. It joins the DHT at ADDRESS, publishes its record there, and
prints whether it has found that of PEER. Then it exchanges a payload with PEER: the descriptors go over stdin
and stdout as lines of hex. At the end it prints the number of payloads that it holds, and whether it still
finds PEER, and waits for one more line before it ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from node.exchange.transport import Entry
from node.security.identity import open_identity
from protocol.errors import HetnodeError
from protocol.types import ExchangeGroup, PeerId
from protocol.wire.records import descriptor_from_bytes, descriptor_to_bytes
from tests.support.hive_nodes import (
    CAPACITY,
    PATIENT,
    RUN,
    canonical,
    describe,
    hosted_in,
    record_of,
    start_transport,
)


async def main(
    folder: Path, certificate: Path, authority: Path, offset: float, peer: PeerId, address: str
) -> None:
    identity = open_identity(folder / "skewed.key")
    entry = Entry(RUN, certificate, authority, (address,), clock_offset=offset)
    hivemind = await start_transport(identity, entry)
    try:
        await hivemind.admit([identity.peer, peer])
        await hivemind.host_stages(hosted_in(folder, {0: CAPACITY}))
        await hivemind.publish(record_of(identity), ttl=60.0)
        print(peer in await hivemind.lookup(), flush=True)
        payload = bytes(100_000)
        own = describe(identity, payload, 0, 1)
        print(descriptor_to_bytes(own).hex(), flush=True)
        theirs = descriptor_from_bytes(bytes.fromhex(await asyncio.to_thread(sys.stdin.readline)))
        group = ExchangeGroup("group", canonical([own, theirs]))
        gathered = await hivemind.exchange(payload, own, group, expected=0, deadline=PATIENT)
        print(len(gathered.held), flush=True)
        print(peer in await hivemind.lookup(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    finally:
        await hivemind.close()


if __name__ == "__main__":
    folder, certificate, authority = map(Path, sys.argv[1:4])
    offset, peer, address = sys.argv[4:]
    try:
        asyncio.run(main(folder, certificate, authority, float(offset), PeerId(peer), address))
    except HetnodeError as error:
        print(error.code.label, flush=True)
