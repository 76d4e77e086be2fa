"""What ``hetnode doctor`` says of ports, NAT, router and relays: from what was found to sentences."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from coordinator.status.cause_text import cause_text
from node.cli.doctor_checks import CheckResult, Severity
from node.cli.doctor_reach import (
    Nat,
    Reach,
    nat_between,
    reach_findings,
    relay_finding,
    router_finding,
    running_finding,
)
from node.home.router.interface import Forwarding
from node.home.router.nat_pmp import NatPmpRouter
from node.home.router.port_mapping import Mapped, PortMapping
from node.net.address_trial import AddressTrial, Place
from protocol.status import Cause, CauseCode
from protocol.trust.reachability import NOT_REACHED, Addresses, Reached
from protocol.types import Reachability, Role
from tests.builders import keyed, status_of

HERE, ROUTER = "192.168.1.10", "44.10.0.101"
OPEN = Reach(
    Addresses("44.10.0.2:7710", "44.10.0.2:7711"),
    Reached(Reachability.OPEN, True, True),
    Mapped(),
    Nat.NONE,
    "44.10.0.2",
    (("44.10.0.1:7702", 0.0123),),
)
HOME = replace(
    OPEN,
    claimed=Addresses(f"{HERE}:7710", f"{HERE}:7711"),
    reached=Reached(
        Reachability.DIAL_ONLY, False, False, "because", "no answer", "the connection is refused"
    ),
    mapped=Mapped(found="no router here forwards ports on request (UPnP, NAT-PMP)"),
    nat=Nat.CHANGES_PORTS,
    seen=ROUTER,
)


def trial(local: Place, seen: Place) -> AddressTrial:
    return AddressTrial(NOT_REACHED, (), local, seen)


def of(reach: Reach) -> dict[str, CheckResult]:
    found = {each.subject: each for each in reach_findings(reach)}
    assert set(found) == {"links", "payloads", "NAT", "router", "relay"}
    for each in found.values():
        assert each.found
        assert each.remedy or each.severity is Severity.OK
        assert each.severity is not Severity.PROBLEM
    return found


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ([(HERE, 5001), (HERE, 5002)], Nat.NONE),
        ([(ROUTER, 5001), (ROUTER, 5002)], Nat.KEEPS_PORTS),
        ([(ROUTER, 5001), (ROUTER, 40123)], Nat.CHANGES_PORTS),
        ([(ROUTER, 40122), (ROUTER, 40123)], Nat.CHANGES_PORTS),
        ([(ROUTER, 0), (ROUTER, 5002)], Nat.UNKNOWN),
        ([(ROUTER, 5001)], Nat.UNKNOWN),
    ],
)
def test_the_kind_of_nat_is_known_from_two_connections(seen: list[Place], kind: Nat) -> None:
    local = [(HERE, 5001), (HERE, 5002)]
    assert nat_between([trial(*ends) for ends in zip(local, seen, strict=False)]) is kind


def test_a_machine_that_is_reached_has_nothing_to_do() -> None:
    found = of(OPEN)
    assert {each.severity for each in found.values()} == {Severity.OK}
    assert found["links"].found == "reachable: the coordinator connects to this machine at 44.10.0.2:7710"
    assert "own address 44.10.0.2" in found["NAT"].found
    assert found["relay"].found == "not needed; the run has 44.10.0.1:7702, 12.3 ms there and back"


def test_a_home_learns_why_it_is_not_reached_and_its_relay() -> None:
    found = of(HOME)
    assert found["links"].found == f"not reachable from the coordinator at {HERE}:7710: no answer"
    assert "--advertise" in found["links"].remedy
    assert "refused" in found["payloads"].found
    assert "each with another port" in found["NAT"].found
    assert "UPnP" in found["router"].remedy
    assert found["relay"].found == "a node here goes through 44.10.0.1:7702, 12.3 ms there and back"
    assert found["relay"].severity is Severity.OK
    assert "keep their port" in of(replace(HOME, nat=Nat.KEEPS_PORTS))["NAT"].found
    assert "not known" in of(replace(HOME, nat=Nat.UNKNOWN))["NAT"].found


def test_what_the_router_offers_is_said() -> None:
    mapping = PortMapping(NatPmpRouter(ROUTER), [Forwarding(7710, 7710, 1200)], 0.0)
    forwards = of(replace(OPEN, mapped=Mapped(mapping, "the router forwards ports")))["router"]
    assert (forwards.severity, forwards.found) == (
        Severity.OK,
        "the router forwards ports, as for a node that joins",
    )
    refuses = of(replace(HOME, mapped=Mapped(None, "the router offers UPnP", "it refuses")))["router"]
    assert refuses.found == "the router offers UPnP, but it refuses"
    assert refuses.severity is Severity.WARNING
    assert of(replace(OPEN, mapped=HOME.mapped))["router"].severity is Severity.OK
    offers = router_finding(Mapped(found="the router offers UPnP"), is_open=False)
    assert (offers.severity, offers.found) == (Severity.OK, "the router offers UPnP")


def test_relays_are_listed_by_their_distance() -> None:
    relays = [("far:1", 0.2), ("gone:1", inf), ("near:1", 0.004)]
    nearest = relay_finding(relays, is_needed=True)
    assert nearest.severity is Severity.OK
    assert nearest.found == (
        "a node here goes through near:1, 4.0 ms there and back "
        "(others: far:1, 200.0 ms there and back; gone:1, without an answer)"
    )
    for none in ([], [("gone:1", inf)]):
        assert relay_finding(none, is_needed=True).severity is Severity.WARNING
        assert relay_finding(none, is_needed=False).severity is Severity.OK


def test_of_a_node_that_runs_the_coordinator_is_believed() -> None:
    status = status_of()
    peer = replace(status.peers[0], role=Role.STAGE, problem="")
    assert running_finding(status, peer).found == "runs (stage); others reach it"
    assert (
        "through a relay" in running_finding(status, replace(peer, reachability=Reachability.RELAYED)).found
    )
    closed = Cause(CauseCode.LINK_CLOSED, peers=(peer.peer, keyed(1).peer), detail="no answer")
    link = running_finding(status, replace(peer, cause=closed))
    assert (link.severity, cause_text(closed) in link.found) == (Severity.WARNING, True)
    alone = running_finding(status, replace(peer, reachability=Reachability.DIAL_ONLY, problem="no answer"))
    assert (alone.severity, alone.found) == (
        Severity.WARNING,
        "runs (stage); others do not reach it: no answer",
    )
