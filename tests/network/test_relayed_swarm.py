"""Homes behind NAT train through relays, and outlive them."""

from __future__ import annotations

import time
from pathlib import Path

from protocol.types import Role
from tests.builders import spec_of
from tests.network.swarm import HOST, NetworkSwarm
from tests.network.world import Home, Nat, World

REPLICA, STAGE = Role.REPLICA, Role.STAGE
DIAL = ("--listen", "none")
NO_RELAY = ("--relay", "none")
HOMES = {"h1": Home(address="192.168.1.10"), "h2": Home(Nat.RANDOM, address="192.168.1.10")}
ROUNDS = 4
ENDLESS = 10_000
"""Rounds of a swarm that the test ends."""


def test_two_homes_are_one_pipeline_beside_a_full_replica(tmp_path: Path) -> None:
    """One says that it only dials, the other claims the address of its own network."""
    timing = {"timing__straggler": 1e6, "timing__match_window": 60.0}
    spec = spec_of(stages=2, replicas=1, pipelines=1, rounds=ROUNDS, **timing)
    with World([HOST, "dc"], HOMES) as world:
        members = {"dc": (REPLICA, ()), "h1": (STAGE, ()), "h2": (STAGE, DIAL)}
        with NetworkSwarm(spec, tmp_path, world, members) as swarm:
            swarm.start()
            swarm.wait_over(240)
            assert len(swarm.decisions()) == ROUNDS * spec.swarm.stages
            assert swarm.aborted == 0
            for name in members:
                assert swarm.contributions(name), name
            assert "through a relay" in swarm.log("h1")


def test_two_replicas_at_homes_and_a_late_joiner_that_only_dials(tmp_path: Path) -> None:
    """All that the late joiner fetches comes from peers behind a relay."""
    spec = spec_of(replicas=2, rounds=ENDLESS)
    homes = {**HOMES, "late": Home(Nat.RANDOM)}
    with World([HOST], homes) as world:
        members = {"h1": (REPLICA, ()), "h2": (REPLICA, DIAL), "late": (REPLICA, (*DIAL, *NO_RELAY))}
        with NetworkSwarm(spec, tmp_path, world, members) as swarm:
            swarm.start_coordinator()
            swarm.start_node("h1")
            swarm.start_node("h2")
            swarm.wait_contributions("h1", "h2")
            swarm.start_node("late")
            swarm.wait_log("late", "this node only dials")
            swarm.wait_contributions("h1", "h2", "late")
            assert swarm.started.keys() - {"coordinator"} == {
                name for name in members if swarm.is_running(name)
            }


def test_a_late_joiner_whose_only_donor_only_dials(tmp_path: Path) -> None:
    """Without any relay: the donor opens the connection over which it serves."""
    with World([HOST, "late"], {"h1": Home(Nat.RANDOM)}) as world:
        members = {"h1": (REPLICA, (*DIAL, *NO_RELAY)), "late": (REPLICA, ())}
        spec = spec_of(replicas=1, rounds=ENDLESS)
        with NetworkSwarm(spec, tmp_path, world, members) as swarm:
            swarm.start_coordinator("--relay", "none")
            swarm.start_node("h1")
            swarm.wait_contributions("h1")
            swarm.start_node("late")
            swarm.wait_contributions("h1", "late")


def test_homes_outlive_their_relays(tmp_path: Path) -> None:
    """A relay is away for five seconds, then for good; another one takes over; then a home is banned.

    Two full replicas have two thirds of the weight, so each round can be committed without the homes.
    """
    spec = spec_of(replicas=2, pipelines=1, rounds=ENDLESS, grouping__balance=False)
    homes = ("h1", "h2")
    with World([HOST, "dc1", "dc2", "r1", "r2"], HOMES) as world:
        members = {"dc1": (REPLICA, ()), "dc2": (REPLICA, ()), "h1": (STAGE, ()), "h2": (STAGE, DIAL)}
        with NetworkSwarm(spec, tmp_path, world, members) as swarm:
            swarm.start_coordinator("--relay", "none")
            swarm.start_relay("r1")
            for name in members:
                swarm.start_node(name)
            for home in homes:
                swarm.wait_log(home, f"others reach this node at {world.address['r1']}:7800")
            swarm.wait_contributions("dc1", *homes)

            swarm.kill("r1")
            time.sleep(5.0)  # what is tested is an absence of this length
            swarm.start_relay("r1")
            for home in homes:
                swarm.wait_log(home, "reachable through the relay", count=2)
            swarm.wait_contributions("dc1", *homes)

            swarm.start_relay("r2")
            swarm.kill("r1")
            for home in homes:
                swarm.wait_log(home, f"others reach this node at {world.address['r2']}:7800")
            swarm.wait_contributions("dc1", *homes)

            banned = swarm.peer("h2")
            swarm.ask("peers", "ban", banned, "--folder", str(swarm.run))
            swarm.wait_log("r2", f"peer {banned} is no longer reachable through this relay")
            swarm.wait_contributions("dc1", "dc2")
            assert swarm.aborted == 0
