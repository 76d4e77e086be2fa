"""``HOST:PORT`` as text. An IPv6 address stands in brackets: ``[2001:db8::1]:7700``.

Another form is a multiaddress, as in /ip4/44.10.0.1/tcp/7701/p2p/12D3Koo...
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address


def host_port(host: str, port: int) -> str:
    """``host:port``. The host is a name or an address, an IPv6 address with or without brackets."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port, which may be 0. Raises ValueError for another form."""
    host, _, port = text.rpartition(":")
    # isdigit() alone accepts digits of other scripts, and int() thousands of digits.
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise ValueError(f"{text!r} is not host:port")
    if int(port) > 65535:
        raise ValueError(f"port {port} of {text!r} is not within 0 and 65535")
    try:
        bare = bare_host(host)
    except ValueError:
        raise ValueError(f"{text!r} is not host:port") from None
    if ":" in bare and bare == host:
        raise ValueError(f"{text!r} is not host:port; an IPv6 address needs brackets, as in [::1]:7700")
    return bare, int(port)


def bare_host(host: str) -> str:
    """`host` without the brackets around an IPv6 address. Raises ValueError for other brackets."""
    if not host.startswith("[") and not host.endswith("]"):
        return host
    bare = host[1:-1]
    if host != f"[{bare}]":
        raise ValueError(f"{host!r} has only one bracket")
    IPv6Address(bare)
    return bare


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
