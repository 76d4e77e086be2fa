"""Links that need a relay share its uplink, and no link goes through a relay that can go without."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from coordinator.placement.cost_model import Survey, relay_uplinks, with_relays
from coordinator.placement.rules import links_between
from coordinator.placement.start import initial_plan
from coordinator.run.state.commands import TellOwnRelay
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from protocol.types import Capacity, Dialer, Lifecycle, Member, PeerId, Plan, Reachability, Role, StageRange
from tests.builders import spec_of
from tests.support.coordinator_run import Run

RELAY, A, B, OPEN, DIAL = (PeerId(name) for name in ("relay", "a", "b", "open", "dial"))
AT_RELAY = "relay.example:7800"


def peer(
    name: PeerId, reachability: Reachability, endpoint: str = "", role: Role = Role.STAGE, uplink: float = 0.0
) -> Peer:
    capacity = Capacity("cpu", 2**30, 1, uplink=uplink)
    return Peer(name, role, capacity, endpoint, 1, Lifecycle.READY, reachability=reachability)


def survey(uplink: float) -> Survey:
    peers = [
        peer(RELAY, Reachability.OPEN, AT_RELAY, Role.RELAY, uplink),
        peer(A, Reachability.RELAYED, AT_RELAY),
        peer(B, Reachability.RELAYED, AT_RELAY),
        peer(OPEN, Reachability.OPEN, "open.example:1"),
        peer(DIAL, Reachability.DIAL_ONLY),
    ]
    state = replace(State(spec_of(), "run"), peers={each.peer: each for each in peers})
    capacities = {each.peer: each.capacity for each in peers}
    return with_relays(Survey.of({}, capacities), peers, relay_uplinks(state))


def test_links_that_need_a_relay_share_its_uplink() -> None:
    found = survey(10e6)
    for pair in ((A, B), (B, A), (A, DIAL), (DIAL, B)):
        assert found.bandwidth(*pair) == 5e6
    for pair in ((A, OPEN), (OPEN, B), (DIAL, OPEN)):
        assert found.bandwidth(*pair) == inf
    assert survey(0.0).bandwidth(A, B) == inf  # the uplink of that relay is not known


def test_nodes_behind_the_coordinators_own_relay_share_the_uplink_that_its_operator_gives() -> None:
    run = Run(spec_of())
    run.accept(TellOwnRelay(AT_RELAY, 10e6))
    homes = [peer(A, Reachability.RELAYED, AT_RELAY), peer(B, Reachability.RELAYED, AT_RELAY)]
    capacities = {each.peer: each.capacity for each in homes}

    def bandwidth() -> float:
        return with_relays(Survey.of({}, capacities), homes, relay_uplinks(run.state)).bandwidth(A, B)

    assert bandwidth() == 5e6
    assert not run.accept(TellOwnRelay(AT_RELAY, 10e6))  # nothing new: no event
    run.accept(TellOwnRelay(AT_RELAY, 0.0))  # started again without the option
    assert bandwidth() == inf


@pytest.mark.parametrize(
    ("upstream", "downstream", "dialer"),
    [
        ("open", "open", Dialer.UPSTREAM),
        ("open", "relayed", Dialer.DOWNSTREAM),
        ("relayed", "open", Dialer.UPSTREAM),
        ("relayed", "relayed", Dialer.UPSTREAM),
        ("relayed", "dial", Dialer.DOWNSTREAM),
        ("dial", "relayed", Dialer.UPSTREAM),
        ("open", "dial", Dialer.DOWNSTREAM),
        ("ipv4", "ipv6", Dialer.DOWNSTREAM),
        ("ipv6", "ipv4", Dialer.UPSTREAM),
        ("open", "ipv6", Dialer.UPSTREAM),
        ("relayed", "ipv6", Dialer.UPSTREAM),
        ("ipv4", "relayed", Dialer.DOWNSTREAM),
    ],
)
def test_no_link_goes_through_a_relay_that_can_go_without(
    upstream: str, downstream: str, dialer: Dialer
) -> None:
    kinds = {
        "open": ("open.example:1", False),
        "relayed": (AT_RELAY, True),
        "dial": ("", False),
        "ipv4": ("192.0.2.1:1", False),
        "ipv6": ("[2001:db8::1]:1", False),
    }
    members = [
        Member(PeerId(str(i)), StageRange(i, i + 1), *kinds[kind])
        for i, kind in enumerate((upstream, downstream))
    ]
    assert [link.dialer for link in links_between(members, 1)] == [dialer]


def test_the_first_plan_knows_the_uplinks_of_relays() -> None:
    """Two homes behind a slow relay are no neighbours if open peers can stand between them."""
    line = 10e6
    peers = [
        replace(peer(name, kind, endpoint, uplink=line), arrival=number)
        for number, (name, kind, endpoint) in enumerate(
            [
                (A, Reachability.RELAYED, AT_RELAY),
                (B, Reachability.RELAYED, AT_RELAY),
                (OPEN, Reachability.OPEN, "open.example:1"),
                (PeerId("open-2"), Reachability.OPEN, "open.example:2"),
            ]
        )
    ]
    plan = initial_plan(peers, spec_of(stages=2, replicas=0, pipelines=2), {}, {AT_RELAY: line / 100})
    assert isinstance(plan, Plan)
    for replica in plan.replicas:
        assert {member.peer for member in replica.members} != {A, B}
