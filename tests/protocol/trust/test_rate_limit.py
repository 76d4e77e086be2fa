"""How often one caller may ask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.trust.rate_limit import RateLimit


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 5), st.floats(0.1, 3))
def test_no_key_gets_more_than_the_burst_and_the_rate(pauses: list[float], burst: int, rate: float) -> None:
    limit = RateLimit(burst, rate)
    now, allowed = 1000.0, 0
    for pause in pauses:
        now += pause
        allowed += limit.allows("a", now)
    assert allowed <= burst + (now - 1000.0) * rate + 1e-6


def test_tokens_return_with_time_and_keys_do_not_share_them() -> None:
    limit = RateLimit(2, 1.0)
    assert [limit.allows("a", 0.0) for _ in range(3)] == [True, True, False]
    assert limit.allows("b", 0.0)
    assert [limit.allows("a", 1.0) for _ in range(2)] == [True, False]


def test_memory_is_bounded_and_the_busy_are_remembered() -> None:
    limit = RateLimit(1, 0.001, keys=3)
    assert limit.allows("busy", 0.0)
    for other in range(1000):
        assert limit.allows(other, 0.0)
        assert not limit.allows("busy", 0.0)
    assert len(limit) == 3


def test_requests_beyond_the_burst_wait_for_their_turn_up_to_a_number() -> None:
    limit = RateLimit(2, 10.0, waiting=3)
    assert [limit.delay("a", 0.0) for _ in range(6)] == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, None])
    assert limit.delay("b", 0.0) == 0.0
    assert limit.delay("a", 0.1) == pytest.approx(0.3)
    assert limit.delay("a", 0.1) is None
    assert limit.delay("a", 9.0) == 0.0
