"""What the coordinator tells the members of a group about each other's lines."""

from __future__ import annotations

import pytest

from coordinator.run.state.commands import Heartbeat, Offer, UpdateAddresses
from coordinator.run.state.lines import rounded_rate, with_most_uplink
from protocol.types import Capacity, Estimates, MemberLine, PeerId, Reachability, Role
from tests.builders import Keyed, keyed, spec_of
from tests.support.coordinator_run import Run, joined_run

A, B = keyed(0), keyed(1)


def lines_after_offers(run: Run, *members: Keyed) -> dict[str, MemberLine]:
    for member in members:
        run.accept(Offer(member.peer, member.payload(run.spec, 0, 1)))
    group = run.state.round_of(0, 1).group
    assert group is not None
    return dict(zip((d.owner for d in group.descriptors), group.lines, strict=False))


def swarm(stages: int = 1) -> Run:
    return joined_run(spec_of(stages=stages, replicas=2), Role.REPLICA, Role.REPLICA)


def measure(run: Run, member: Keyed, uplink: float, downlink: float) -> None:
    capacity = Capacity("cpu", 1 << 34, 1, 0.0, uplink, downlink)
    run.accept(Heartbeat(member.peer, 1, 0, Estimates(capacity)))


def test_a_group_has_the_rounded_line_of_each_member() -> None:
    run = swarm()
    measure(run, A, 1.05e6, 4.2e6)
    lines = lines_after_offers(run, A, B)
    assert lines[A.peer] == MemberLine(1 << 20, 1 << 22, True)
    assert lines[B.peer].uplink == 0, "it has not measured its own"


def test_a_member_divides_its_line_among_its_stages() -> None:
    run = swarm(stages=2)
    measure(run, A, 1 << 21, 1 << 22)
    assert lines_after_offers(run, A, B)[A.peer] == MemberLine(1 << 20, 1 << 21, True)


def test_a_group_without_measurements_has_no_lines() -> None:
    run = swarm()
    assert lines_after_offers(run, A, B) == {}


def test_others_do_not_reach_a_peer_that_only_dials() -> None:
    run = swarm()
    measure(run, A, 1e6, 4e6)
    run.accept(UpdateAddresses(A.peer, "", Reachability.DIAL_ONLY, "", ""))
    assert not lines_after_offers(run, A, B)[A.peer].is_open


@pytest.mark.parametrize(
    ("rate", "rounded"),
    [(0.0, 0), (0.4, 1), (1.0, 1), (1000.0, 1024), (1.4e6, 1482910), (1e30, 1 << 50)],
)
def test_rates_are_rounded_to_half_powers_of_two(rate: float, rounded: int) -> None:
    assert rounded_rate(rate) == rounded


@pytest.mark.parametrize(
    ("uplinks", "chosen"),
    [
        ({"a": 0, "b": 0, "c": 0}, ("a", "b", "c")),
        ({"a": 5.0, "b": 5.0, "c": 5.1}, ("a", "b", "c")),
        ({"a": 1.0, "b": 900.0, "c": 1000.0, "d": 0.0}, ("b", "c")),
        ({"a": 1.0, "b": 1000.0, "c": 50.0}, ("b", "c")),
        ({"a": 1.0}, ("a",)),
        ({}, ()),
    ],
)
def test_the_fastest_uplinks_that_have_half_of_all_are_fetched_from(
    uplinks: dict[str, float], chosen: tuple[str, ...]
) -> None:
    assert with_most_uplink({PeerId(name): rate for name, rate in uplinks.items()}) == chosen
