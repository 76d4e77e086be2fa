"""A DHT peer without our validator, which writes into others' records.

``python -m tests.hive_forger KEY ADDRESS`` reads "SUBKEY HEX-OF-VALUE" lines, stores each under KEY with a
later expiry than the record that is there, and prints whether any peer of the DHT accepted it.
"""

from __future__ import annotations

import sys

from hivemind import DHT
from hivemind.utils import get_dht_time

if __name__ == "__main__":
    key, address = sys.argv[1:]
    dht = DHT([address], start=True, nat_port_map=False)
    for line in sys.stdin:
        subkey, value = line.split()
        expires = get_dht_time() + 600
        # Never at the forger itself: only what honest peers keep counts.
        stored = dht.store(key, bytes.fromhex(value), expires, subkey=subkey, exclude_self=True)
        print(stored, flush=True)
    dht.shutdown()
