"""Where a peer says that others reach it, and what answered when the coordinator dialled it there."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from protocol.trust.endpoints import split_endpoint
from protocol.types import Reachability

DIAL_BACK_SECONDS = 3.0
"""How long the coordinator tries the addresses of one peer before it answers a call."""
_LEAST_PORT, _HTTPS = 1024, 443


@dataclass(frozen=True)
class Addresses:
    """Claims of a peer: ``host:port`` for links and of its DHT peer, each "" where it only dials.

    `relayed` says that both belong to a relay.
    """

    endpoint: str = ""
    dht: str = ""
    relayed: bool = False


@dataclass(frozen=True)
class Reached:
    """Which of the claimed addresses answered as that peer, and `reason`, a sentence for people, or "".

    `endpoint_problem` and `dht_problem` say why a claimed address did not; they may be the end of a sentence.
    """

    reachability: Reachability
    endpoint: bool = False
    dht: bool = False
    reason: str = ""
    endpoint_problem: str = ""
    dht_problem: str = ""


NOT_REACHED = Reached(Reachability.DIAL_ONLY)
"""Of a peer that claims no address."""


def port_obstacle(address: str) -> str:
    """Why the port of ``host:port`` is not dialled; "" if it may be."""
    _, port = split_endpoint(address)
    usual = port >= _LEAST_PORT or port == _HTTPS
    return "" if usual else f"ports below {_LEAST_PORT} are not dialled, except {_HTTPS}"


def address_obstacle(address: str, source: str) -> str:
    """Why an IP address is not dialled for a caller from `source`; "" if it may be."""
    if ip_address(address).is_global or not _is_global(source):
        return ""
    return f"{address} is an address of a private network, and this node calls from {source}"


def _is_global(source: str) -> bool:
    try:
        return ip_address(source.partition("/")[0]).is_global
    except ValueError:
        return True  # nothing is known of it
