"""How many calls of the DHT one peer gets."""

from __future__ import annotations

from node.exchange.hive.dht_protocol import CallLimit


def test_a_caller_gets_500_calls_at_once_and_100_in_a_second() -> None:
    now = 0.0
    limit = CallLimit(lambda: now)
    assert sum(limit.allows("caller") for _ in range(1000)) == 500
    assert limit.allows("another")
    now = 1.0
    assert sum(limit.allows("caller") for _ in range(1000)) == 100


def test_a_caller_that_is_refused_loses_no_later_calls() -> None:
    now = 0.0
    limit = CallLimit(lambda: now)
    for _ in range(10_000):
        limit.allows("caller")
    now = 10.0
    assert sum(limit.allows("caller") for _ in range(1000)) == 500
