"""The addresses of this machine's network interfaces."""

from __future__ import annotations

import socket
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network

import psutil

from protocol.server.limits import source_of_host

_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))


def interface_addresses() -> tuple[IPv4Interface | IPv6Interface, ...]:
    """Each address with its network, loopback addresses last; no link-local ones."""
    found = []
    for each in (address for addresses in psutil.net_if_addrs().values() for address in addresses):
        if each.family in (socket.AF_INET, socket.AF_INET6):
            mask = ip_address(each.netmask) if each.netmask else None
            length = "" if mask is None else f"/{int(mask).bit_count()}"
            found.append(ip_interface(each.address.partition("%")[0] + length))
    return tuple(
        sorted((each for each in found if not each.is_link_local), key=lambda each: each.is_loopback)
    )


def own_sources() -> tuple[str, ...]:
    """The sources that are this machine itself."""
    return tuple({source_of_host(str(each.ip)): None for each in interface_addresses()})


def private_networks() -> tuple[str, ...]:
    """The networks of this machine's private addresses, such as "192.168.1.0/24"."""
    return tuple(
        str(each.network)
        for each in interface_addresses()
        if any(each in private for private in _PRIVATE if private.version == each.version)
    )
