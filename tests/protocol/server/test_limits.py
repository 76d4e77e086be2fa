"""What counts as one source, and what one of many callers can take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.server.limits import FairShare, source_of


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:192.0.2.7:1234", "192.0.2.7"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:99", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:99", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:99", "fe80::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:99", "192.0.2.7"),
        ("unix:/tmp/socket", "unix"),
        ("", "unknown"),
    ],
)
def test_requests_of_one_host_or_one_ipv6_network_count_together(peer: str, source: str) -> None:
    assert source_of(peer) == source


def test_one_key_gets_no_more_than_its_own_limit() -> None:
    places = FairShare(each=3, total=100)
    assert [places.take("a") for _ in range(4)] == [True, True, True, False]
    assert places.take("b")
    places.release("a")
    assert places.take("a")
    assert len(places) == 4


def test_greedy_keys_leave_places_for_others() -> None:
    places = FairShare(each=1000, total=100)
    taken = []
    for name in "abc":
        before = len(places)
        while places.take(name):
            pass
        taken.append(len(places) - before)
    assert taken == [50, 25, 13]
    assert places.take("honest")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=100))
def test_places_are_neither_lost_nor_given_twice(steps: list[tuple[str, bool]]) -> None:
    places, taken = FairShare(each=5, total=8), list[str]()
    for key, takes in steps:
        if takes and places.take(key):
            taken.append(key)
        elif not takes and key in taken:
            taken.remove(key)
            places.release(key)
        assert len(places) == len(taken) <= 8
        assert taken.count(key) <= 5
