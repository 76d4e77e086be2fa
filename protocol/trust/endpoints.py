"""Which endpoints a peer may have. Each peer names its own, and the other peers dial it.

Without a rule, one peer could make the machines of all others call a service that only they can reach.
Loopback and private addresses are permitted: a swarm on one machine or in one local network has no others.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import pairwise

from protocol.trust.host_port import split_host_port

# Services of a cloud's own machines, which hand out their credentials; most others are link-local.
_METADATA = (
    ip_network("169.254.169.254/32"),
    ip_network("100.100.100.200/32"),
    ip_network("168.63.129.16/32"),
    ip_network("192.0.0.192/32"),
    ip_network("fd00:ec2::/32"),
    ip_network("fd20:ce::254/128"),
)
_THIS_NETWORK = ip_network("0.0.0.0/8")  # Linux connects 0.0.0.0 to this machine
_NAT64 = ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48")
_BROADCAST = IPv4Address("255.255.255.255")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
# getaddrinfo reads a name with such an end as an IPv4 address: 2852039166 is 169.254.169.254.
_NUMERIC_END = re.compile(r"(.*\.)?([0-9]+|0[xX][0-9A-Fa-f]*)\.?", re.ASCII)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """As :func:`split_host_port`, with a port that can be dialled."""
    host, port = split_host_port(endpoint)
    if not port:
        raise ValueError(f"port 0 of {endpoint!r} is not within 1 and 65535")
    return host, port


def ip_version(endpoint: str) -> int:
    """4 or 6; 0 if the host of `endpoint` is a name."""
    try:
        return ip_address(split_endpoint(endpoint)[0]).version
    except ValueError:
        return 0


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError unless a peer may have `endpoint`. A name is not resolved here."""
    host, _ = split_endpoint(endpoint)
    check_host(host)


def check_host(host: str) -> None:
    """Raises ValueError unless `host` is a name, or an address that a peer may have."""
    try:
        address = ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host) or _NUMERIC_END.fullmatch(host):
            raise ValueError(f"{host!r} is neither a name nor an IP address in its usual form") from None
        return
    check_address(address)


def check_address(address: IPv4Address | IPv6Address) -> None:
    """Raises ValueError unless a peer may have `address`."""
    kind = _forbidden_kind(_embedded(address))
    if kind:
        raise ValueError(f"{address} is {kind}, which no peer may have")


def check_multiaddress(multiaddress: str) -> None:
    """Raises ValueError unless a peer may have every address, name and port in a multiaddress."""
    parts = multiaddress.split("/")
    for protocol, value in pairwise(parts):
        if protocol in ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"):
            check_host(value)
        elif protocol in ("tcp", "udp"):
            split_endpoint(f"host:{value}")


def _embedded(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address to which packets for an IPv6 `address` go in the end; else `address`."""
    if isinstance(address, IPv4Address):
        return address
    if any(address in network for network in _NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _forbidden_kind(address: IPv4Address | IPv6Address) -> str:
    """The kind of an address that no peer may have; "" for all others."""
    if address.is_loopback:
        return ""
    kinds = (
        ("the address of a cloud's metadata service", any(address in network for network in _METADATA)),
        ("an unspecified address", address.is_unspecified or address in _THIS_NETWORK),
        ("a link-local address", address.is_link_local),
        ("a multicast address", address.is_multicast),
        ("the broadcast address", address == _BROADCAST),
        ("a reserved address", address.is_reserved),
    )
    return next((kind for kind, applies in kinds if applies), "")
