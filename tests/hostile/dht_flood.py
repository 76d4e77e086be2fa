"""Calls the DHT of other peers as often as it can, as a member, from docs/protocol/minimum-peer.md alone.

    python -m tests.hostile.dht_flood FILE

FILE is JSON: `identity` and `certificate` name files; `run`, `dht_peers`, the peer ids `targets`, `seconds`,
`at_once` and `nbytes` are values. Each call asks for the value of one key of `nbytes` bytes. It prints how
the calls have ended, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2

from tests.hostile.dht_record import Authorizer
from tests.hostile.wire import Identity

CALL_SECONDS = 20.0


async def flood(given: dict[str, Any], authorizer: Authorizer) -> Counter[str]:
    p2p = await P2P.create(
        initial_peers=given["dht_peers"],
        identity_path=given["identity"],
        check_if_identity_free=False,
        nat_port_map=False,
    )
    ended, ends = Counter[str](), time.monotonic() + given["seconds"]

    async def call(target: str) -> None:
        request = dht_pb2.FindRequest(keys=[bytes(given["nbytes"])])
        await authorizer.sign_request(request, target)
        calling = p2p.call_protobuf_handler(
            PeerID.from_base58(target), "DHTProtocol.rpc_find", request, dht_pb2.FindResponse
        )
        await asyncio.wait_for(calling, CALL_SECONDS)

    async def repeat(target: str) -> None:
        while time.monotonic() < ends:
            try:
                await call(target)
                ended["answered"] += 1
            except Exception as error:  # hivemind and libp2p raise anything here
                ended[type(error).__name__] += 1

    each = given["at_once"] // len(given["targets"])
    await asyncio.gather(*(repeat(target) for target in given["targets"] for _ in range(each)))
    await p2p.shutdown()
    return ended


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    identity = Identity(Ed25519PrivateKey.from_private_bytes(Path(given["identity"]).read_bytes()[4:36]))
    pem = Path(given["certificate"]).read_bytes()
    certificate = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    print(json.dumps(asyncio.run(flood(given, Authorizer(given["run"], identity, certificate)))))


if __name__ == "__main__":
    main()
