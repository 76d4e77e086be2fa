"""Pauses between attempts."""

from __future__ import annotations

from protocol.server.backoff import pause_after


def test_a_pause_doubles_up_to_its_bound_and_any_number_of_attempts_is_possible() -> None:
    assert [pause_after(failures, 2.0, 60.0) for failures in (1, 2, 3, 4, 5, 6, 7)] == [
        2,
        4,
        8,
        16,
        32,
        60,
        60,
    ]
    # Hours without a network: a float has no room for 2 to the power of 1024.
    assert pause_after(1026, 2.0, 60.0) == pause_after(10**9, 2.0, 60.0) == 60.0
