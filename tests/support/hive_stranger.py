"""A libp2p peer without a certificate: ``SOURCE IDENTITY ADDRESS MEMBER``.

It dials ADDRESS from the loopback address SOURCE, and asks libp2p's own DHT for MEMBER. It prints "connected"
or "refused", and then the addresses of MEMBER that it has learned, or "unknown".
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

_FIND_SECONDS = 5.0


async def ask(source: str, identity: str, address: str, member: str) -> None:
    # libp2p dials from the address on which it listens.
    p2p = await P2P.create(
        host_maddrs=[f"/ip4/{source}/tcp/0"],
        identity_path=identity,
        check_if_identity_free=False,
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
    )
    place, _, peer = address.rpartition("/p2p/")
    try:
        await p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(place)])
        print("connected", flush=True)
        attempts = 2  # peers enter each other's routing tables some time after the connection
    except ControlFailure:
        print("refused", flush=True)
        attempts = 3
    print(await find(p2p, PeerID.from_base58(member), attempts), flush=True)
    await p2p.shutdown()


async def find(p2p: P2P, wanted: PeerID, attempts: int) -> str:
    """The addresses of `wanted`; "unknown" if libp2p's DHT does not find them."""
    for _ in range(attempts):
        with suppress(ControlFailure, TimeoutError):
            await asyncio.wait_for(p2p._client.connect(wanted, []), _FIND_SECONDS)
            found = [each.addrs for each in await p2p.list_peers() if each.peer_id == wanted]
            return " ".join(map(str, found[0]))
        await asyncio.sleep(0.5)
    return "unknown"


def main() -> None:
    asyncio.run(ask(*sys.argv[1:]))


if __name__ == "__main__":
    main()
