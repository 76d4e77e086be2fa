"""What homes train in chains and in pools, where it can be computed by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.pools import LINKED_SECONDS, Home, Setting, chains, pools

ROUND, LOAD = 1000.0, 100.0


def setting(*homes: tuple[float, float, float], rounds: int = 1) -> Setting:
    """Two stages; of each home the rate, and from when to when it is on."""
    return Setting(tuple(Home(rate, ((begin, end),)) for rate, begin, end in homes), 2, rounds, ROUND, LOAD)


def always(rate: float) -> tuple[float, float, float]:
    return rate, -1.0, math.inf


def test_equal_homes_that_stay_are_always_busy() -> None:
    one = setting(*[always(1.0)] * 4, rounds=2)
    assert chains(one, None) == chains(one, 0.0) == pools(one) == one.most == 4 * ROUND


def test_the_slowest_of_a_chain_and_the_slowest_stage_set_the_pace() -> None:
    one = setting(*map(always, (4.0, 4.0, 2.0, 1.0)))
    assert chains(one, None) == (4 + 1) * ROUND
    assert pools(one) == 5 * ROUND  # 5 and 6


def test_who_goes_takes_along_what_its_stage_has_learned_from_it() -> None:
    one = setting(always(1.0), (1.0, -1.0, 400.0))
    assert chains(one, None) == pools(one) == 400 * (1 - 1 / 2)


def test_all_pools_may_wait_where_a_home_goes() -> None:
    one = setting(always(1.0), always(1.0), (1.0, -1.0, 400.0), always(1.0))
    # 2 microbatches a second in all, then 1; the half of 400 that one stage has learned is lost.
    assert pools(one) == 2 * 400 - 400 / 2 + 600
    assert pools(one, pause=20.0) == pools(one) - 20


@pytest.mark.parametrize("spare", [always(1.0), (1.0, 300.0, math.inf)])
def test_a_spare_takes_the_seat_as_soon_as_it_is_linked(spare: tuple[float, float, float]) -> None:
    one = setting(always(1.0), (1.0, -1.0, 600.0), spare)
    # Whichever stage it follows: one that follows the other one loads that of the seat first.
    late = LINKED_SECONDS, LINKED_SECONDS + LOAD
    assert ROUND - 300 - chains(one, 0.0) in late
    assert chains(one, None) == 300


def test_who_comes_waits_for_the_next_round_only_in_chains() -> None:
    one = setting(always(1.0), always(1.0), (1.0, 200.0, math.inf), (1.0, 200.0, math.inf), rounds=2)
    assert chains(one, 0.0) == 3 * ROUND
    assert pools(one) == 4 * ROUND - 200 - LOAD


def test_a_swarm_that_moves_is_late_by_the_load() -> None:
    one = setting(*[always(1.0)] * 2, rounds=3)
    assert chains(one, 0.0, moved=True) == 3 * ROUND - 2 * LOAD
