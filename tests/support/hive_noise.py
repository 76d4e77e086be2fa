"""A member of the run that writes random bytes to every call that a peer of its stage answers.

Its arguments are ADDRESS IDENTITY HANDLE... It connects under IDENTITY to the peer at ADDRESS, calls each
HANDLE, and prints for each how many calls have arrived.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress

from hivemind.p2p import P2P, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

TIMES = 40
_SECONDS = 5.0


async def send_noise(address: str, identity: str, handles: list[str]) -> None:
    p2p = await P2P.create(
        initial_peers=[address], identity_path=identity, check_if_identity_free=False, nat_port_map=False
    )
    peer = PeerID.from_base58(Multiaddr(address)["p2p"])
    noise = random.Random(0)
    for handle in handles:
        arrived = 0
        for _ in range(TIMES):
            body = noise.randbytes(noise.choice((0, 1, 9, 300, 70_000)))
            # A length that fits, one that does not, and two that promise gigabytes; then a mark of a message.
            size = noise.choice((len(body), noise.randrange(1 << 16), 8 << 30, (1 << 64) - 1))
            frame = size.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + noise.choice((b"\0", b"\1", b"")) + body
            with suppress(ControlFailure):  # it is a unary call, and takes no stream
                _, reader, writer = await p2p.call_binary_stream_handler(peer, handle)
                arrived += 1
                with suppress(OSError, TimeoutError):
                    writer.write(frame)
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(), _SECONDS)
                writer.close()
            try:
                await asyncio.wait_for(p2p._client.call_unary_handler(peer, handle, body), _SECONDS)
                arrived += 1
            except (P2PHandlerError, P2PDaemonError) as error:
                arrived += "not supported" not in str(error)  # it is a stream, and takes no unary call
        print(arrived, flush=True)
    await p2p.shutdown()


def main() -> None:
    asyncio.run(send_noise(sys.argv[1], sys.argv[2], sys.argv[3:]))
