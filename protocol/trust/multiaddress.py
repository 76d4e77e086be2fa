"""Multiaddresses, another form of ``host:port``, as in /ip4/44.10.0.1/tcp/7701/p2p/12D3Koo..."""

from __future__ import annotations

from ipaddress import ip_address

from protocol.trust.host_port import bare_host


def multiaddress(host: str, port: int) -> str:
    """The multiaddress of a TCP port."""
    host = bare_host(host)
    try:
        return f"/ip{ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"


def tcp_place(address: str) -> tuple[str, int] | None:
    """Host and TCP port with which a multiaddress begins; None if it begins otherwise."""
    parts = address.split("/", 5)
    if len(parts) < 5 or parts[0] or not parts[2] or parts[3] != "tcp":
        return None
    host, port = parts[2], parts[4]
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    return (host, int(port)) if is_number and int(port) <= 65535 else None
