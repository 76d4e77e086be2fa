"""Addresses change while a run goes on, and a line flaps: peers are linked again, others lose no round."""

from __future__ import annotations

import time
from pathlib import Path

from protocol.types import Role
from tests.builders import spec_of
from tests.network.swarm import NetworkSwarm
from tests.network.world import Home, World

REPLICA, STAGE = Role.REPLICA, Role.STAGE
OTHERS = {name: (REPLICA, ()) for name in ("dc1", "dc2")}
"""Two full replicas have two thirds of the weight: a round can be committed without the pipeline."""
SPEC = spec_of(replicas=2, pipelines=1, rounds=200, inner__steps=8, grouping__balance=False)
MOVED, NEW_LEASE = "44.10.0.99", "44.10.0.199"
FLAPS, DOWN_SECONDS, UP_SECONDS = 5, 1.0, 2.0  # as fast as 20 in a minute


def assert_undisturbed(swarm: NetworkSwarm, since: int) -> None:
    # Round 1 closes without a replica that is still starting (coordinator/run/rounds/deadlines.py).
    assert all(each["committed"] for each in swarm.decisions() if each["round"] > 1)
    assert not any(swarm.missed_rounds(name, since) for name in OTHERS)
    assert not any(map(swarm.times_lost, swarm.members))


def test_addresses_change_in_mid_round_and_a_line_flaps(tmp_path: Path) -> None:
    members = OTHERS | {"pub": (STAGE, ()), "home": (STAGE, ())}
    with (
        World(["coord", "pub", *OTHERS], {"home": Home()}) as world,
        NetworkSwarm(SPEC, tmp_path, world, members) as swarm,
    ):

        def wait_until_home_and_pub_contribute(after: str) -> None:
            """In a round that began later than now; what is under way may be lost for them."""
            began = time.monotonic()
            now = swarm.round_number
            swarm.wait_until(
                lambda: all(max(swarm.contributions(name), default=0) > now + 1 for name in ("home", "pub")),
                120,
                f"contributions after {after}",
            )
            done = swarm.round_number
            have = [sorted(each for each in swarm.contributions(n) if each > now) for n in ("home", "pub")]
            print(f"{after}: {time.monotonic() - began:.1f} s, decided {now} to {done}, contributed {have}")

        swarm.start_coordinator("--relay", "none")
        for name in members:
            swarm.start_node(name)
        first = swarm.wait_contributions(*members)

        world.move_public("pub", MOVED)
        told = f"others reach this node at {MOVED}:"
        swarm.wait_log("pub", told, 60)
        wait_until_home_and_pub_contribute("a new address of a public peer")

        world.move_router("home", NEW_LEASE)
        wait_until_home_and_pub_contribute("a new lease of a home's provider")
        world.move_home("home", "192.168.1.77")
        wait_until_home_and_pub_contribute("a new lease of a home's router")

        for _ in range(FLAPS):
            world.unplug("pub")
            time.sleep(DOWN_SECONDS)
            world.plug("pub")
            time.sleep(UP_SECONDS)
        wait_until_home_and_pub_contribute("flaps")

        assert_undisturbed(swarm, first)


def test_an_open_laptop_that_is_carried_into_a_home_takes_a_relay(tmp_path: Path) -> None:
    """Its neighbour is at a home as well, so they need one."""
    members = OTHERS | {"laptop": (STAGE, ()), "home": (STAGE, ())}
    with (
        World(["coord", "laptop", *OTHERS], {"home": Home(), "cafe": Home()}) as world,
        NetworkSwarm(SPEC, tmp_path, world, members) as swarm,
    ):
        swarm.start()
        first = swarm.wait_contributions(*members)
        assert "others reach this node at 44.10.0.2:" in swarm.log("laptop")
        began = time.monotonic()
        world.carry("laptop", "cafe", "192.168.1.88")
        swarm.wait_log("laptop", "through a relay")
        told = time.monotonic() - began
        swarm.wait_contributions("laptop", "home")
        print(f"told after {told:.1f} s, contributed after {time.monotonic() - began:.1f} s")
        assert_undisturbed(swarm, first)


def test_a_peer_changes_between_ipv4_and_ipv6(tmp_path: Path) -> None:
    """The coordinator has a name with addresses of both, and so have the other peers."""
    members = OTHERS | {"pub": (STAGE, ()), "near": (STAGE, ())}
    with (
        World(["coord", "pub", "near", *OTHERS], names={"coord.test": "coord"}) as world,
        NetworkSwarm(SPEC, tmp_path, world, members, "[::]:7700") as swarm,
    ):
        world.drop("pub", 6)
        swarm.start_coordinator("--relay", "none", "--advertise", "coord.test")
        for name in members:
            swarm.start_node(name)
        first = swarm.wait_contributions(*members)
        assert "others reach this node at 44.10.0.2:" in swarm.log("pub")
        assert "others reach this node at [2a0e:1234::3]:" in swarm.log("near")

        for gone, back, told in ((4, 6, "[2a0e:1234::2]:"), (6, 4, "44.10.0.2:")):
            began, done = time.monotonic(), swarm.log("pub").count(f"others reach this node at {told}")
            world.drop("pub", gone)
            world.restore("pub", back)
            swarm.wait_log("pub", f"others reach this node at {told}", 60, done + 1)
            at = time.monotonic() - began
            swarm.wait_contributions("pub", "near")
            print(
                f"IPv{gone} to IPv{back}: told after {at:.1f} s, contributed {time.monotonic() - began:.1f}"
            )
        assert_undisturbed(swarm, first)
