"""The times of a search for a group."""

from __future__ import annotations

import pytest

from node.exchange.hive.matchmaking import SearchTimes


@pytest.mark.parametrize("deadline", [0.5, 2.0, 30.0, 600.0])
def test_a_request_is_given_up_before_the_window_ends_so_that_another_leader_can_be_asked(
    deadline: float,
) -> None:
    times = SearchTimes.of_exchange(deadline)
    assert times.request < times.window
    assert times.search < deadline


def test_a_long_exchange_waits_longer_for_slow_peers() -> None:
    assert SearchTimes.of_exchange(600).window > SearchTimes.of_exchange(60).window
    assert SearchTimes.of_exchange(60).window > 3
