"""libp2p's form of host and port."""

from __future__ import annotations

import pytest

from protocol.trust.multiaddress import multiaddress, tcp_place


@pytest.mark.parametrize("host", ["44.10.0.1", "2a0e:1234::1", "node.example.org"])
def test_host_and_port_come_back(host: str) -> None:
    assert tcp_place(multiaddress(host, 7701)) == (host, 7701)
    assert tcp_place(f"{multiaddress(host, 7701)}/p2p/12D3KooW/p2p-circuit") == (host, 7701)


def test_brackets_are_no_part_of_a_host() -> None:
    assert multiaddress("[::1]", 1) == "/ip6/::1/tcp/1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "44.10.0.1:7701",
        "/ip4/44.10.0.1",
        "/ip4//tcp/1",
        "/ip4/44.10.0.1/udp/7701",
        "/ip4/44.10.0.1/tcp/",
        "/ip4/44.10.0.1/tcp/65536",
        "/ip4/44.10.0.1/tcp/-1",
        "/ip4/44.10.0.1/tcp/" + "9" * 5000,
        "/ip4/44.10.0.1/tcp/\u0661",
        "x/ip4/44.10.0.1/tcp/1",
    ],
)
def test_other_text_is_no_tcp_place(text: str) -> None:
    assert tcp_place(text) is None
