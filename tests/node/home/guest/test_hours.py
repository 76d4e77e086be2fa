"""The hours of a guest: by the clock on the wall, over midnight, in every night of the year."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, time, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.home.guest.hours import Hours, HoursRule, Range, parse_hours
from protocol.errors import ErrorCode, HetnodeError
from tests.virtual.scenario import TWO, Play, contributions, departures, swarm_spec
from tests.virtual.swarm import VirtualSwarm

DAY = 24 * 60
minutes = st.integers(0, DAY - 1)
ranges = st.tuples(minutes, st.integers(0, DAY)).filter(lambda pair: pair[0] != pair[1])
hours = st.lists(ranges, min_size=1, max_size=4).map(
    lambda found: Hours(tuple(Range(*pair) for pair in found))
)


def at(minute: int) -> time:
    return time(minute // 60, minute % 60)


@given(hours)
def test_hours_are_read_as_they_are_written(found: Hours) -> None:
    assert parse_hours(str(found)) == found
    assert parse_hours(str(found).replace(",", " , ")) == found


@given(hours, minutes)
def test_a_minute_is_in_the_hours_when_a_walk_from_a_begin_meets_it_before_the_end(
    found: Hours, minute: int
) -> None:
    def walk(one: Range) -> set[int]:
        length = (one.end - one.begin) % DAY or DAY
        return {(one.begin + passed) % DAY for passed in range(length)}

    assert found.contain(at(minute)) == any(minute in walk(one) for one in found.ranges)


@given(ranges.filter(lambda pair: pair[1] < DAY), minutes)
def test_the_rest_of_the_day_is_what_the_hours_leave(pair: tuple[int, int], minute: int) -> None:
    begin, end = pair
    inside, outside = Hours((Range(begin, end),)), Hours((Range(end, begin),))
    assert inside.contain(at(minute)) != outside.contain(at(minute))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "22:00",
        "22-7",
        "22:00-22:00",
        "24:00-07:00",
        "22:00-24:01",
        "22:60-07:00",
        "1:00-2:00,",
        "٢٢:00-07:00",
    ],
)
def test_what_are_no_hours_is_refused(text: str) -> None:
    with pytest.raises(HetnodeError) as refused:
        parse_hours(text)
    assert refused.value.code is ErrorCode.BAD_OPTION


@pytest.mark.parametrize(
    "zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
)
def test_every_night_of_a_year_has_one_begin_and_one_end(zone: str) -> None:
    clock = datetime(2026, 1, 1, 12, tzinfo=UTC)

    def now() -> datetime:
        return clock.astimezone(ZoneInfo(zone))

    rule = HoursRule(parse_hours("22:00-07:00"), 1.0, now)
    changes: list[tuple[datetime, bool]] = []
    for _ in range(365 * 96):
        clock += timedelta(minutes=15)
        may = rule.rest() is None
        if not changes or changes[-1][1] != may:
            changes.append((now(), may))
    for (_, former), (_, later) in pairwise(changes):
        assert former != later
    begins = [found for found, may in changes[1:] if may]
    assert {(found.hour, found.minute) for found in begins} == {(22, 0)}
    assert len({found.date() for found in begins}) == len(begins) >= 364
    ends = {(found.hour, found.minute) for found, may in changes[1:] if not may}
    assert ends == {(7, 0)}


def test_a_node_rests_outside_its_hours_and_comes_back(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        wall = datetime(2026, 3, 29, 6, 59, 50)
        node, began = swarm.nodes["b"], swarm.loop.time()
        node.rules = (
            HoursRule(
                parse_hours("07:01-12:00,22:00-07:00"),
                60.0,
                lambda: wall + timedelta(seconds=swarm.loop.time() - began),
            ),
        )
        swarm.start()
        await asyncio.sleep(40)
        assert departures(swarm, "b") == ["drained"]
        assert not swarm.guest("b").is_here
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b")[-1] == 10

    play(scenario, TWO, swarm_spec(TWO, rounds=10), step_seconds=4.0)
