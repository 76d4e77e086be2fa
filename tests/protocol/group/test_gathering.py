"""The schedule of an exchange: everybody gets everything, and slow uplinks are spared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.group.gathering import Schedule, schedule_of
from protocol.types import MemberLine, PeerId
from tests.support.gathering import least_seconds

MEGABIT = 125_000
LIMIT = 1.2
"""Of the least possible time."""

rates = st.sampled_from(
    [0, 1, 7 * MEGABIT, 10 * MEGABIT, 40 * MEGABIT, 100 * MEGABIT, 1000 * MEGABIT, 10**15]
)
swarms = st.lists(st.builds(MemberLine, rates, rates, st.booleans()), min_size=2, max_size=12).map(
    lambda lines: {PeerId(f"peer-{i:02d}"): line for i, line in enumerate(lines)}
)
seeds = st.text(max_size=3)


def home(uplink: float = 10, downlink: float = 100, is_open: bool = True) -> MemberLine:
    return MemberLine(round(uplink * MEGABIT), round(downlink * MEGABIT), is_open)


def named(*lines: MemberLine) -> dict[PeerId, MemberLine]:
    return {PeerId(f"{i}"): line for i, line in enumerate(lines)}


def pairs(schedule: Schedule) -> list[tuple[PeerId, PeerId]]:
    members = schedule.members
    return [(owner, member) for owner in members for member in members if owner != member]


@given(swarms, seeds)
def test_every_payload_has_a_way_from_its_owner_to_every_member(
    lines: dict[PeerId, MemberLine], seed: str
) -> None:
    if (schedule := schedule_of(seed, lines)) is None:
        return
    for owner, member in pairs(schedule):
        sources = schedule.sources(owner, member)
        assert sources[-1] == owner
        assert member not in sources
        assert len(set(sources)) == len(sources) <= 3
        at = member
        for _ in lines:
            at = owner if at == owner else schedule.sources(owner, at)[0]
        assert at == owner


@given(swarms, seeds)
def test_no_members_wait_for_each_other_whatever_sources_fail(
    lines: dict[PeerId, MemberLine], seed: str
) -> None:
    if (schedule := schedule_of(seed, lines)) is None:
        return
    for owner in lines:
        waits = {each: set(schedule.sources(owner, each)) - {owner} for each in lines if each != owner}
        while waits:
            free = {member for member, sources in waits.items() if not sources & waits.keys()}
            assert free, f"a cycle: {waits}"
            waits = {member: sources for member, sources in waits.items() if member not in free}


@given(swarms, seeds)
def test_the_quotas_are_what_the_members_send(lines: dict[PeerId, MemberLine], seed: str) -> None:
    if (schedule := schedule_of(seed, lines)) is None:
        return
    sent = Counter(schedule.sources(owner, member)[0] for owner, member in pairs(schedule))
    assert tuple(sent[member] for member in schedule.members) == schedule.copies


@given(swarms, seeds)
def test_a_member_that_others_cannot_dial_sends_its_own_payload_once(
    lines: dict[PeerId, MemberLine], seed: str
) -> None:
    if (schedule := schedule_of(seed, lines)) is None:
        return
    for member, copies in zip(schedule.members, schedule.copies, strict=True):
        assert lines[member].is_open or copies == 1


@given(swarms, seeds, st.randoms(use_true_random=False))
def test_all_members_find_the_same_schedule(
    lines: dict[PeerId, MemberLine], seed: str, rng: random.Random
) -> None:
    items = list(lines.items())
    rng.shuffle(items)
    one, other = schedule_of(seed, lines), schedule_of(seed, dict(items))
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert [one.sources(*pair) for pair in pairs(one)] == [other.sources(*pair) for pair in pairs(one)]


@given(swarms, seeds)
@example(named(*[MemberLine(875_000, 0, True)] * 3, MemberLine(5_000_000, 0, True)), "0")
def test_the_load_on_an_uplink_is_in_proportion_to_its_rate(
    lines: dict[PeerId, MemberLine], seed: str
) -> None:
    if (schedule := schedule_of(seed, lines)) is None:
        return
    # Closed members send one copy, so their uplinks are none that could be used.
    able = [MemberLine(line.uplink if line.is_open else 1, line.downlink, True) for line in lines.values()]
    if any(line.uplink == 0 for line in able):
        return
    # Copies are whole: each member may leave a part of a copy to others, n of n (n - 1) at most.
    level = least_seconds(able, 1) * len(able) / (len(able) - 1)
    for member, copies in zip(schedule.members, schedule.copies, strict=True):
        assert copies <= 1 + lines[member].uplink * level or not lines[member].is_open


@settings(max_examples=10)
@given(st.integers(4, 20), st.integers(1, 8), seeds)
def test_a_home_sends_its_payload_once_where_others_have_uplink_to_spare(
    homes: int, strong: int, seed: str
) -> None:
    lines = named(*[home(10, 50)] * homes, *[home(2000, 2000)] * strong)
    schedule = schedule_of(seed, lines)
    assert schedule is not None
    for member, copies in zip(schedule.members, schedule.copies, strict=True):
        assert copies == 1 or lines[member].uplink > home().uplink
    helpers = Counter(schedule.sources(owner, member)[0] for owner, member in pairs(schedule))
    spread = [helpers[member] for member in lines if lines[member].uplink > home().uplink]
    assert max(spread) - min(spread) <= 1, "equal lines have equal loads"


def direct_seconds(lines: Sequence[MemberLine], nbytes: int) -> float:
    """Until all members have payloads of `nbytes` for which they have asked each owner."""
    rates = [rate for line in lines for rate in (line.uplink, line.downlink) if rate]
    return nbytes * (len(lines) - 1) / min(rates) if rates else 0.0


@pytest.mark.parametrize("members", [8, 30])
@settings(max_examples=20)
@given(data=st.data())
def test_the_time_is_near_the_least_possible(members: int, data: st.DataObject) -> None:
    lines = named(
        *(
            home(
                data.draw(st.sampled_from([10, 20, 40, 100, 1000])),
                data.draw(st.sampled_from([50, 250, 1000])),
            )
            for _ in range(members)
        )
    )
    schedule = schedule_of("seed", lines)
    seconds = direct_seconds(list(lines.values()), 1) if schedule is None else schedule.seconds(1)
    assert seconds <= LIMIT * least_seconds(list(lines.values()), 1)


@pytest.mark.parametrize(
    "lines",
    [
        named(home(), home()),
        named(home(), home(), home()),
        named(home(is_open=False), home(1000, is_open=False), home(is_open=False)),
        named(*[MemberLine(0, 0, True)] * 5),
    ],
    ids=["two members", "equal lines", "nobody can be dialled", "nothing measured"],
)
def test_nobody_helps_where_that_saves_nothing(lines: dict[PeerId, MemberLine]) -> None:
    assert schedule_of("seed", lines) is None


def test_a_member_between_two_homes_passes_on_both_payloads() -> None:
    slow, other, strong = (PeerId(f"{i}") for i in range(3))
    schedule = schedule_of("seed", {slow: home(), other: home(), strong: home(1000)})
    assert schedule is not None
    assert schedule.sources(slow, other) == (strong, slow)
    assert schedule.sources(slow, strong) == (slow,)
    assert schedule.sources(strong, slow) == (strong,)
    assert schedule.helpers(slow) == (strong,)
    assert schedule.helpers(strong) == ()


def test_a_helper_that_fails_has_a_substitute_which_is_the_same_for_all() -> None:
    lines = named(*[home()] * 6, *[home(1000)] * 2)
    schedule = schedule_of("seed", lines)
    assert schedule is not None
    first, second = schedule.helpers(PeerId("0"))
    for member in list(lines)[1:6]:
        assert schedule.sources(PeerId("0"), member) == (first, second, "0")
    assert schedule.sources(PeerId("0"), first) == ("0",)
    assert schedule.sources(PeerId("0"), second) == (first, "0")


def test_one_very_slow_line_does_not_take_the_help_from_the_others() -> None:
    lines = named(*[home()] * 8, *[home(1000, 1000)] * 4, home(0.01, 0.01))
    schedule = schedule_of("seed", lines)
    assert schedule is not None
    copies = dict(zip(schedule.members, schedule.copies, strict=True))
    assert all(copies[PeerId(f"{i}")] > 30 for i in range(8, 12))


def test_a_helper_asks_no_substitute_before_the_owner() -> None:
    lines = named(home(1000, 100), home(10, 1000), *[home(1000, 100)] * 3, home(100, 40), home(1000, 1000))
    schedule, owner = Schedule("", lines), PeerId("1")
    first, second, third = schedule.helpers(owner)[:3]
    assert schedule.sources(owner, first) == (owner,)
    assert schedule.sources(owner, second) == (first, owner)
    assert len(schedule.sources(owner, third)) == 2, "helpers that ask substitutes could wait for each other"
