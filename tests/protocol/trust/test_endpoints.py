"""Which endpoints a peer may have: addresses in every spelling, names, ports, multiaddresses."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.trust.endpoints import check_address, check_endpoint, check_multiaddress, split_endpoint

PEER = "12D3KooWFpPiCCGDcHoRvsZk3383wv67ET5aTEE6VCteesWANveD"

FORBIDDEN = [
    ("169.254.169.254", "metadata service"),
    ("169.254.170.2", "link-local"),
    ("100.100.100.200", "metadata service"),
    ("168.63.129.16", "metadata service"),
    ("192.0.0.192", "metadata service"),
    ("0.0.0.0", "unspecified"),
    ("0.1.2.3", "unspecified"),
    ("224.0.0.1", "multicast"),
    ("239.255.255.250", "multicast"),
    ("255.255.255.255", "broadcast"),
    ("240.0.0.1", "reserved"),
    ("fd00:ec2::254", "metadata service"),
    ("fd20:ce::254", "metadata service"),
    ("fe80::1", "link-local"),
    ("::", "unspecified"),
    ("ff02::1", "multicast"),
    # IPv4 inside IPv6: mapped, compatible, 6to4, NAT64
    ("::ffff:169.254.169.254", "metadata service"),
    ("::ffff:a9fe:a9fe", "metadata service"),
    ("::ffff:0.0.0.0", "unspecified"),
    ("::169.254.169.254", "reserved"),
    ("2002:a9fe:a9fe::", "metadata service"),
    ("64:ff9b::a9fe:a9fe", "metadata service"),
    ("64:ff9b:1::a9fe:1", "link-local"),
]
PERMITTED = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.255", "100.64.0.1", "8.8.8.8", "::1", "fd12::1"),
    *("2001:4860:4860::8888", "::ffff:127.0.0.1", "::ffff:192.168.0.1", "64:ff9b::808:808"),
]


@pytest.mark.parametrize(("address", "kind"), FORBIDDEN)
def test_no_peer_may_have_these_addresses(address: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind}.*which no peer may have"):
        check_endpoint(f"[{address}]:7700" if ":" in address else f"{address}:7700")
    version = ip_address(address).version
    with pytest.raises(ValueError, match=f"{kind}.*which no peer may have"):
        check_multiaddress(f"/ip{version}/{address}/tcp/7700/p2p/{PEER}")


@pytest.mark.parametrize("address", PERMITTED)
def test_loopback_private_and_public_addresses_are_permitted(address: str) -> None:
    check_endpoint(f"[{address}]:7700" if ":" in address else f"{address}:7700")
    check_multiaddress(f"/ip{ip_address(address).version}/{address}/tcp/7700/p2p/{PEER}")


@pytest.mark.parametrize("name", ["localhost", "h", "node-1.example.org", "node_1", "1.example.org", "host."])
def test_names_are_permitted(name: str) -> None:
    check_endpoint(f"{name}:1")
    check_multiaddress(f"/dns4/{name}/tcp/1")


@pytest.mark.parametrize(
    "host",
    # Other spellings of 169.254.169.254 that getaddrinfo reads, and targets of gRPC that are no hosts.
    [
        *("2852039166", "0xa9fea9fe", "0xa9.254.169.254", "0251.0376.0251.0376", "169.254.43518", "1.", "0x"),
        *(
            "169.254.169.254.",
            "unix:/run/socket",
            "dns:///x",
            "ipv4:127.0.0.1",
            "a b",
            "a/b",
            "é",
            "[::1",
            "%",
        ),
        *("%", "fe80::1%eth0", "[[::1]]", "-x", "a,b", "１"),
    ],
)
def test_what_is_neither_a_name_nor_a_usual_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"neither a name|which no peer may have|not host:port"):
        check_endpoint(f"{host}:7700")


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1", "+1", "1.0", "", "１", "9" * 5000, "000001"])
def test_ports_are_1_to_65535(port: str) -> None:
    for check, endpoint in ((check_endpoint, f"h:{port}"), (check_multiaddress, f"/dns/h/tcp/{port}")):
        with pytest.raises(ValueError, match=r"not within [01] and 65535|is not host:port"):
            check(endpoint)


def test_every_address_of_a_multiaddress_counts() -> None:
    relay = f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit/ip6/fe80::1/udp/1/quic"
    with pytest.raises(ValueError, match="link-local"):
        check_multiaddress(relay)
    check_multiaddress(relay.replace("fe80::1", "::1"))


@given(st.text(max_size=40))
def test_any_text_raises_nothing_but_value_error(text: str) -> None:
    for check in (check_endpoint, check_multiaddress, split_endpoint):
        for each in (text, f"{text}:1", f"/ip4/{text}"):
            try:
                check(each)
            except ValueError:
                continue


@given(st.integers(0, 2**32 - 1).map(ip_address))
def test_an_address_within_ipv6_is_judged_as_the_same_in_ipv4(address: object) -> None:
    def is_permitted(one: str) -> bool:
        try:
            check_address(ip_address(one))
        except ValueError:
            return False
        return True

    assert (
        is_permitted(f"::ffff:{address}") == is_permitted(str(address)) == is_permitted(f"64:ff9b::{address}")
    )
