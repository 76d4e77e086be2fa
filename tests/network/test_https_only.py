"""Homes whose routers let out nothing but HTTPS take part in a run: all that they open goes to port 443."""

from __future__ import annotations

from pathlib import Path

from protocol.types import Role
from tests.builders import spec_of
from tests.network.swarm import HOST, NetworkSwarm
from tests.network.world import Home, Nat, World

HTTPS = 443
ROUNDS = 4
ENDLESS = 10_000
"""Rounds of a swarm that the test ends."""


def test_two_homes_on_port_443_are_one_pipeline_beside_a_full_replica(tmp_path: Path) -> None:
    homes = {"h1": Home(ports=(HTTPS,)), "h2": Home(Nat.RANDOM, ports=(HTTPS,))}
    members = {"dc": (Role.REPLICA, ()), "h1": (Role.STAGE, ()), "h2": (Role.STAGE, ())}
    timing = {"timing__straggler": 1e6, "timing__match_window": 60.0}
    spec = spec_of(stages=2, replicas=1, pipelines=1, rounds=ROUNDS, **timing)
    with (
        World([HOST, "dc"], homes) as world,
        NetworkSwarm(spec, tmp_path, world, members, f"{world.address[HOST]}:{HTTPS}") as swarm,
    ):
        swarm.start_coordinator("--one-port")
        for name in members:
            swarm.start_node(name)
        swarm.wait_over(240)
        assert len(swarm.decisions()) == ROUNDS * spec.swarm.stages
        assert swarm.aborted == 0
        assert not any(map(swarm.times_lost, members))
        for home in homes:
            assert swarm.contributions(home) == set(range(1, ROUNDS + 1))
            swarm.wait_log(home, "goes through the relay")


def test_a_late_joiner_on_port_443_catches_up_from_a_donor_on_port_443(tmp_path: Path) -> None:
    """Each is behind another relay, and all payloads and checkpoints go through both. One starts again."""
    homes = {name: Home(Nat.RANDOM, "192.168.1.10", (HTTPS,)) for name in ("h1", "late")}
    with World([HOST, "r1"], homes) as world:
        apart = ("--relay", f"{world.address['r1']}:{HTTPS}")
        members = {"h1": (Role.REPLICA, ()), "late": (Role.REPLICA, apart)}
        spec = spec_of(replicas=1, rounds=ENDLESS)
        with NetworkSwarm(spec, tmp_path, world, members, f"{world.address[HOST]}:{HTTPS}") as swarm:
            swarm.start_coordinator("--one-port")
            swarm.start_relay("r1", HTTPS)
            swarm.start_node("h1")
            swarm.wait_contributions("h1")
            swarm.start_node("late")
            swarm.wait_contributions("h1", "late")
            assert f"others reach this node at {world.address['r1']}:{HTTPS}" in swarm.log("late")
            swarm.kill("r1")
            swarm.start_relay("r1", HTTPS)
            swarm.wait_log("late", "reachable through the relay", count=2)
            swarm.wait_contributions("h1", "late")
            assert not any(map(swarm.times_lost, members))
