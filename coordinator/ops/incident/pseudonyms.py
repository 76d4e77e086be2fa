"""Names that take the place of real ones in a recorded incident: peers with keys, addresses, labels."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from protocol.trust.endpoints import split_endpoint
from protocol.trust.envelope import peer_id_of
from protocol.types import PeerId

MOST_PEERS = 100_000
"""Peers of an incident; each of them costs the making of a key."""

# Addresses for documentation, which no machine has: RFC 5737 and RFC 3849.
_IPV4 = tuple(map(IPv4Network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")))
_IPV6 = IPv6Network("2001:db8::/32")
_FIRST_PORT, _PORTS = 7001, 58_000


def pseudonymous_keys(count: int) -> dict[PeerId, Ed25519PrivateKey]:
    """`count` peers and their keys, in the order of their ids; the same for the same count.

    The keys are public: they sign what the peers of a replayed log signed. ValueError beyond MOST_PEERS.
    """
    if not 0 <= count <= MOST_PEERS:
        raise ValueError(f"{count} peers, not up to {MOST_PEERS}")
    seeds = (hashlib.sha256(f"hetnode incident peer {number}".encode()).digest() for number in range(count))
    keys = [Ed25519PrivateKey.from_private_bytes(seed) for seed in seeds]
    ids = [peer_id_of(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)) for key in keys]
    return dict(sorted(zip(ids, keys, strict=True), key=lambda each: each[0]))


def pseudonyms(peers: Collection[PeerId]) -> Mapping[PeerId, PeerId]:
    """A pseudonym for each of `peers`, in the same order: the rules of a round sort peers by their ids."""
    found = sorted(set(peers))
    return dict(zip(found, pseudonymous_keys(len(found)), strict=True))


class Labels:
    """Gives each text a label with a number, in the order in which the texts come."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        return self._form.format(self._numbers.setdefault(text, len(self._numbers) + 1))


class ReplacedAddresses:
    """Gives each ``host:port`` an address for documentation of the same kind: IPv4, IPv6 or a name.

    Equal hosts stay equal, and different addresses stay different.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}
        self._ports: dict[str, dict[int, int]] = {}
        self._counts = {0: 0, 4: 0, 6: 0}

    def __call__(self, address: str) -> str:
        try:
            host, port = split_endpoint(address)
        except ValueError:
            host, port = address, 1  # such a claim was refused
        if host not in self._hosts:
            self._hosts[host] = self._documentation_host(host)
        ports = self._ports.setdefault(host, {})
        number = ports.setdefault(port, len(ports))
        return f"{self._hosts[host]}:{_FIRST_PORT + number % _PORTS}"

    def _documentation_host(self, host: str) -> str:
        version = _version(host)
        self._counts[version] += 1
        number = self._counts[version]
        block, place = divmod(number - 1, 254)
        if version == 4 and block < len(_IPV4):
            return str(_IPV4[block][place + 1])
        if version == 6:
            return f"[{_IPV6[number]}]"
        return f"host-{number}.v{version}.example" if version else f"host-{number}.example"


def _version(host: str) -> int:
    try:
        return ip_address(host).version
    except ValueError:
        return 0
