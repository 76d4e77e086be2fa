"""A DHT peer of the run without the validator, which writes into the records of others.

Its arguments are PEER KEY ADDRESS IDENTITY CERTIFICATE AUTHORITY. It reads lines
"SUBKEY HEX-OF-VALUE EXPIRES", stores each under KEY, and prints whether any peer of the DHT accepted it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hivemind import DHT

from node.exchange.hive.authorizer import CertificateAuthorizer, signer_of
from node.exchange.hive.dht_protocol import node_id_of, use_bounded_protocol

if __name__ == "__main__":
    peer, key, address, *files = sys.argv[1:]
    identity, certificate, authority = map(Path, files)
    use_bounded_protocol()  # honest peers call it back, and its authorizer must see who calls
    dht = DHT(
        [address],
        node_id=node_id_of(peer),
        start=True,
        nat_port_map=False,
        identity_path=str(identity),
        check_if_identity_free=False,
        authorizer=CertificateAuthorizer(
            key.removesuffix(".peers"), signer_of(identity), certificate, authority
        ),
    )
    for line in sys.stdin:
        subkey, value, expires = line.split()
        # Never at the forger itself: only what honest peers keep counts.
        stored = dht.store(key, bytes.fromhex(value), float(expires), subkey=subkey, exclude_self=True)
        print(stored, flush=True)
    dht.shutdown()
