"""HOST:PORT as text, and as a multiaddress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.trust.host_port import bare_host, host_port, multiaddress, split_host_port, tcp_place

NAMES = st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,40}", fullmatch=True)
HOSTS = st.one_of(NAMES, st.ip_addresses().map(str))


@given(HOSTS, st.integers(0, 65535))
def test_what_is_written_is_read(host: str, port: int) -> None:
    text = host_port(host, port)
    assert split_host_port(text) == (host, port)
    assert text.startswith("[") == (":" in host)


@given(st.ip_addresses(v=6).map(str))
def test_brackets_may_stand_around_an_address_already(host: str) -> None:
    assert bare_host(f"[{host}]") == bare_host(host) == host
    assert host_port(f"[{host}]", 7700) == host_port(host, 7700) == f"[{host}]:7700"


def test_an_address_of_one_interface_keeps_its_zone() -> None:
    assert split_host_port("[fe80::1%eth0]:7700") == ("fe80::1%eth0", 7700)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "h", "h:", ":1", "h:65536", "h:-1", "h:1a", "h:٣", "h:000001", "h:1 "),
        *(
            "::1:7700",
            "::1",
            "[::1]",
            "[::1:7700",
            "::1]:7700",
            "[h]:1",
            "[127.0.0.1]:1",
            "[]:1",
            "[[::1]]:1",
        ),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|not within 0 and 65535"):
        split_host_port(text)


def test_a_missing_bracket_is_named() -> None:
    with pytest.raises(ValueError, match="needs brackets, as in"):
        split_host_port("2001:db8::7:7700")


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        host, port = split_host_port(text)
    except ValueError:
        return
    assert split_host_port(host_port(host, port)) == (host, port)


@pytest.mark.parametrize("host", ["44.10.0.1", "2a0e:1234::1", "node.example.org"])
def test_host_and_port_of_a_multiaddress_come_back(host: str) -> None:
    assert tcp_place(multiaddress(host, 7701)) == (host, 7701)
    assert tcp_place(f"{multiaddress(host, 7701)}/p2p/12D3KooW/p2p-circuit") == (host, 7701)


def test_brackets_are_no_part_of_the_host_in_a_multiaddress() -> None:
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
