"""A peer that is alone in a DHT of its own, and then greets another one.

Its arguments are ADDRESS PEER IDENTITY CERTIFICATE AUTHORITY FOLDER. Prints the peers to which it is
connected before and after the greeting, one line each.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from node.exchange.hive.authorizer import CertificateAuthorizer, signer_of
from node.exchange.hive.dht import HostedDHT
from node.exchange.hive.dht_protocol import node_id_of, use_bounded_protocol
from tests.support.hive_nodes import PATIENT, RUN


def connected(dht: HostedDHT) -> str:
    async def peers() -> list[str]:
        p2p = await dht.replicate_p2p()
        return [each.peer_id.to_base58() for each in await p2p.list_peers()]

    return " ".join(asyncio.run(peers()))


def main() -> None:
    address, peer, *files = sys.argv[1:]
    identity, certificate, authority, folder = map(Path, files)
    use_bounded_protocol()
    dht = HostedDHT(
        folder,
        CertificateAuthorizer(RUN, signer_of(identity), certificate, authority),
        node_id=node_id_of(peer),
        nat_port_map=False,
        identity_path=str(identity),
        check_if_identity_free=False,
    )
    dht.start()
    dht.wait_until_ready(PATIENT)
    print(connected(dht))
    dht.initial_peers = [address]
    dht.greet(PATIENT)
    print(connected(dht))
    dht.shutdown()


if __name__ == "__main__":
    main()
