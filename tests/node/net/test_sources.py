"""From which sources a node accepts connections."""

from __future__ import annotations

import socket

import pytest

from node.net.membership import RunView
from node.net.sources import AcceptedSources, member_sources
from protocol.server.interfaces import private_networks
from protocol.types import Member, PeerId, Plan, Replica, StageRange

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
STAGES = StageRange(0, 1)


def plan_of(**endpoints: str) -> Plan:
    members = [Member(PeerId(peer), STAGES, endpoint) for peer, endpoint in endpoints.items()]
    replicas = [Replica(index, (member,), ()) for index, member in enumerate(members)]
    return Plan(1, 1, 0, tuple(replicas), "a test")


def test_members_are_admitted_where_they_called_from_and_where_they_accept_links() -> None:
    plan = plan_of(a="192.0.2.1:7700", b="[2001:db8:1:2::3]:7700", c="node.example:7700", d="")
    view = RunView(plans={1: plan}, sources={A: ("198.51.100.1", "192.0.2.1"), C: ("198.51.100.3",)})
    assert member_sources(view) == {"192.0.2.1", "198.51.100.1", "198.51.100.3", "2001:db8:1:2::/64"}


def test_nothing_of_a_banned_member_is_admitted_but_what_another_member_shares() -> None:
    plan = plan_of(a="192.0.2.1:7700", b="192.0.2.2:7700")
    shared = "198.51.100.9"
    view = RunView(plans={1: plan}, sources={A: ("198.51.100.1", shared), B: (shared,)})
    assert member_sources(RunView(plans=view.plans, sources=view.sources, banned=frozenset({A}))) == {
        "192.0.2.2",
        shared,
    }


async def test_the_coordinator_and_private_networks_are_admitted() -> None:
    accepted = AcceptedSources()
    await accepted.resolve_coordinator("[2001:db8:7:7::1]:7700", ["/ip4/192.0.2.7/tcp/1/p2p/x", "nonsense"])
    assert accepted.of(RunView()) == {"2001:db8:7:7::/64", "192.0.2.7", *private_networks()}


async def test_a_coordinator_whose_name_does_not_resolve_now_keeps_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted = AcceptedSources()
    await accepted.resolve_coordinator("localhost:7700", ["/dns/localhost/tcp/1/p2p/x"])
    before = accepted.of(RunView())
    assert "127.0.0.1" in before

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror("no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    await accepted.resolve_coordinator("localhost:7700", ["/dns/localhost/tcp/1/p2p/x"])
    assert accepted.of(RunView()) == before
