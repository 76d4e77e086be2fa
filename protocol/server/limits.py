"""Limits that one caller cannot use up for all: what counts as one source, and fair shares of a total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from protocol.trust.host_port import split_host_port


def source_of(peer: str) -> str:
    """The source behind gRPC's name of a client; its scheme or "unknown" if that names no address."""
    scheme, _, address = peer.partition(":")
    try:
        host, _ = split_host_port(unquote(address))
    except ValueError:
        host = ""
    return source_of_host(host) or scheme or "unknown"


def source_of_host(host: str) -> str:
    """The IPv4 address or the IPv6 /64 of `host`, an address in text; "" if it is none."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        # One household owns a whole /64.
        return f"{IPv6Address(int(found) >> 64 << 64)}/64"
    return str(found)


@lru_cache(maxsize=4096)  # each call of a member asks
def is_address(source: str) -> bool:
    """Whether a source names an address, and not only a scheme or "unknown"."""
    return source_of_host(source.removesuffix("/64")) == source


class FairShare:
    """Places that callers take and release: at most `each` of one key, and no more than are still free.

    By the second rule a greedy key leaves half of all places to others, and the next one half of these. Only
    several greedy keys together can take nearly all; if they release places, shares become equal.
    """

    def __init__(self, each: int, total: int) -> None:
        self._each, self._total = each, total
        self._taken: Counter[Hashable] = Counter()
        self._sum = 0

    def __len__(self) -> int:
        """How many places are taken."""
        return self._sum

    def take(self, key: Hashable) -> bool:
        """Take a place for `key` if it may have one more; the caller must :meth:`release` it."""
        if self._taken[key] >= min(self._each, self._total - self._sum):
            if not self._taken[key]:  # entries of keys without a place would pile up
                del self._taken[key]
            return False
        self._taken[key] += 1
        self._sum += 1
        return True

    def release(self, key: Hashable) -> None:
        self._sum -= 1
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
