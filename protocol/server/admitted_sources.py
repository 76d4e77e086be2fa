"""The sources whose connections a gateway accepts."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

EVERYONE = ("0.0.0.0/0", "::/0")
"""Every source. For tests, and for networks that no stranger can reach."""


class AdmittedSources:
    """A set of sources (protocol.server.limits), and of networks such as "192.168.1.0/24", as text.

    An IPv6 /64 is both: a network and one source. Raises ValueError for a network that is none.
    """

    def __init__(self, sources: Collection[str]) -> None:
        self._sources: set[str] = set()
        self._networks: dict[str, IPv4Network | IPv6Network] = {}  # those that are more than one source
        self.change(sources, ())

    def change(self, added: Collection[str], removed: Collection[str]) -> None:
        self._networks |= {each: ip_network(each) for each in added if _is_network(each)}
        for each in removed:
            self._networks.pop(each, None)
        self._sources.difference_update(removed)
        self._sources.update(added)

    def admits(self, source: str) -> bool:
        if source in self._sources:
            return True
        try:
            address = ip_address(source.partition("/")[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks.values())


def _is_network(text: str) -> bool:
    return "/" in text and not (":" in text and text.endswith("/64"))
