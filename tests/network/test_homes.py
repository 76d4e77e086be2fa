"""Homes behind NAT in real runs: who is planned, who is told what, and that other replicas lose no round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from protocol.types import Role
from tests.builders import spec_of
from tests.network.swarm import NetworkSwarm
from tests.network.world import Home, Nat, World

REPLICA, STAGE = Role.REPLICA, Role.STAGE
DIAL = ("--listen", "none")
HOMES = {"h1": Home(), "h2": Home(Nat.RANDOM)}
NO_RELAY = ("--relay", "none")


@contextmanager
def swarm_in(
    folder: Path,
    public: Sequence[str],
    homes: Mapping[str, Home],
    members: Mapping[str, tuple[Role, Sequence[str]]],
    rounds: int = 4,
) -> Iterator[tuple[World, NetworkSwarm]]:
    """A started swarm without a relay: as many replicas and pipelines as its members can form."""
    roles = [role for role, _ in members.values()]
    shape = {"replicas": roles.count(REPLICA), "pipelines": roles.count(STAGE) // 2}
    # The first round waits for a node that starts slowly.
    spec = spec_of(rounds=rounds, timing__straggler=1e6, timing__match_window=60, **shape)
    with World(["coord", *public], homes) as world, NetworkSwarm(spec, folder, world, members) as swarm:
        swarm.start_coordinator(*NO_RELAY)
        for name in members:
            swarm.start_node(name)
        yield world, swarm


def test_homes_with_default_options_are_not_believed_and_told_why(tmp_path: Path) -> None:
    members = {"dc": (REPLICA, ()), "h1": (STAGE, ()), "h2": (STAGE, ())}
    with swarm_in(tmp_path, ["dc"], HOMES, members) as (world, swarm):
        for home in HOMES:
            swarm.wait_log(home, f"does not reach this node at {world.address[home]}:")
            assert "--advertise" in swarm.log(home)
            swarm.wait_log(home, "cannot be neighbours")
        swarm.wait_log("dc", f"others reach this node at {world.address['dc']}:")
        swarm.wait_log("coordinator", "cannot be neighbours; one of these peers must be reached by others")
        status = swarm.status_text()
        assert status.count("does not reach this node") == 2
        assert not swarm.decisions()


def test_two_replicas_that_only_dial_are_told_at_once(tmp_path: Path) -> None:
    members = {"h1": (REPLICA, DIAL), "h2": (REPLICA, ())}
    with swarm_in(tmp_path, [], HOMES, members) as (_, swarm):
        for name in ("coordinator", "h1", "h2"):
            swarm.wait_log(name, "only dial, so their replicas cannot exchange payloads")
        assert not swarm.decisions()


def test_a_home_trains_beside_peers_that_are_reached(tmp_path: Path) -> None:
    members = {"dc": (REPLICA, ()), "h1": (STAGE, ()), "pub": (STAGE, ())}
    with swarm_in(tmp_path, ["dc", "pub"], {"h1": Home(Nat.RANDOM)}, members) as (_, swarm):
        swarm.wait_over(180, *members)
        assert swarm.aborted == 0
        assert all(swarm.contributions(name) for name in ("dc", "pub", "h1"))


def test_a_forwarded_port_makes_a_home_open(tmp_path: Path) -> None:
    # The router's public address is the first of all homes.
    options = ("--listen", "0.0.0.0:7710", "--dht-port", "7711", "--advertise", "44.10.0.101")
    members = {"h2": (STAGE, DIAL), "h1": (STAGE, options)}
    with World(["coord"], HOMES) as world:
        for port in (7710, 7711):
            world.forward("h1", port)
        spec = spec_of(replicas=0, pipelines=1, rounds=2)
        with NetworkSwarm(spec, tmp_path, world, members) as swarm:
            swarm.start_coordinator(*NO_RELAY)
            swarm.start_node("h2")
            # The first is to have stage 0, so that only a home that cannot be dialled has its payloads.
            swarm.wait_log("h2", "waiting for 1 more stage peer")
            swarm.start_node("h1")
            swarm.wait_log("h1", "others reach this node at 44.10.0.101:7710 (links) and 44.10.0.101:7711")
            swarm.wait_over(120, *members)
            assert "replica-0, stage 0" in swarm.log("h2")
            assert swarm.aborted == 0


def test_a_link_that_cannot_open_is_named_and_costs_its_own_pipeline_only(tmp_path: Path) -> None:
    """The coordinator reaches both members, which do not reach each other: a wall between two providers."""
    members = {"dc": (REPLICA, ()), "a": (STAGE, ()), "b": (STAGE, ())}
    with World(["coord", "dc", "a", "b"]) as world:
        spec = spec_of(replicas=1, pipelines=1, rounds=4)
        with NetworkSwarm(spec, tmp_path, world, members) as swarm:
            for here, there in (("a", "b"), ("b", "a")):
                world.run(here, f"iptables -A INPUT -p tcp -s {world.address[there]} -j DROP")
            swarm.start_coordinator(*NO_RELAY)
            for name in members:
                swarm.start_node(name)
            swarm.wait_log("coordinator", "cannot open its link to", 120)
            dialled = {name for name in "ab" if "cannot be opened yet" in swarm.log(name)}
            (dialler,) = dialled
            address = world.address["b" if dialler == "a" else "a"]
            for name in ("a", "b"):
                swarm.wait_log(name, f"at {address}:")
            swarm.wait_over(180, "dc")
            assert swarm.aborted == 0
            assert swarm.contributions("dc") == {1, 2, 3, 4}
