"""Which sources a gateway accepts."""

from __future__ import annotations

import pytest

from protocol.server.admitted_sources import EVERYONE, AdmittedSources


def test_named_sources_and_those_within_named_networks_are_admitted_and_no_others() -> None:
    admitted = AdmittedSources(("192.0.2.7", "2001:db8:1:2::/64", "192.168.0.0/16", "fd00:7::/48"))
    for source in ("192.0.2.7", "2001:db8:1:2::/64", "192.168.9.9", "fd00:7:0:1::/64"):
        assert admitted.admits(source), source
    for source in ("192.0.2.8", "2001:db8:1:3::/64", "192.169.0.1", "fd00:8::/64", "unknown", ""):
        assert not admitted.admits(source), source


def test_nobody_is_admitted_at_first_and_everyone_can_be() -> None:
    assert not AdmittedSources(()).admits("127.0.0.1")
    for source in ("127.0.0.1", "192.0.2.7", "2001:db8:1:2::/64"):
        assert AdmittedSources(EVERYONE).admits(source)


def test_sources_and_networks_come_and_go() -> None:
    admitted = AdmittedSources(("192.0.2.7", "10.0.0.0/8"))
    admitted.change(("192.0.2.8", "192.168.0.0/16"), ("192.0.2.7", "10.0.0.0/8"))
    assert [admitted.admits(each) for each in ("192.0.2.7", "10.1.1.1", "192.0.2.8", "192.168.1.1")] == [
        False,
        False,
        True,
        True,
    ]


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="IPv4 or IPv6"):
        AdmittedSources(("a.example/8",))
