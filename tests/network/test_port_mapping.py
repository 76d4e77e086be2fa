"""Homes whose router forwards ports on request: they are open to others without a setting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.security.credentials import folder_of
from protocol.types import Role
from tests.builders import spec_of
from tests.network.forwarding_router import forwarded, forwarding, missing
from tests.network.swarm import NetworkSwarm
from tests.network.world import Home, Nat, World

HOMES = {"h1": Home(), "h2": Home(Nat.RANDOM)}


@pytest.fixture(autouse=True)
def _router_program() -> None:
    if reason := missing():
        pytest.skip(reason)


def test_homes_are_open_by_upnp_and_by_nat_pmp(tmp_path: Path) -> None:
    """They form one pipeline. When they have left, nothing is forwarded, and doctor looks at both homes."""
    members = {"h1": (Role.STAGE, ()), "h2": (Role.STAGE, ())}
    with (
        World(["coord"], HOMES) as world,
        forwarding(world, "h1", tmp_path, upnp=True, nat_pmp=False),
        forwarding(world, "h2", tmp_path, upnp=False, nat_pmp=True),
        NetworkSwarm(spec_of(replicas=0, pipelines=1, rounds=1000), tmp_path, world, members) as swarm,
    ):
        swarm.start_coordinator()
        for name in members:
            swarm.start_node(name)
        for name, protocol in (("h1", "UPnP"), ("h2", "NAT-PMP")):
            public = world.seen_as[name]
            for text in (
                f"the router forwards ports of {public} to this machine ({protocol})",
                f"others reach this node at {public}:",
            ):
                swarm.wait_log(name, text)
            own = [each.rpartition(":")[0] for each in forwarded(world, name)]
            assert own == [world.address[name]] * 2
        swarm.wait_until(lambda: all(map(swarm.contributions, members)), 120, "a round of both")
        for name in members:
            swarm.started[name].process.send_signal(signal.SIGTERM)
        swarm.wait_over(120, *members)
        for name in members:
            assert forwarded(world, name) == []
        doctors = {
            "h1": Doctor(swarm, world, "h1"),
            "h2": Doctor(swarm, world, "h2", "--advertise", world.address["h2"]),
        }
        examined = {name: each.findings() for name, each in doctors.items()}
    assert_a_home_that_is_reached(examined["h1"], world.seen_as["h1"])
    assert_a_home_behind_symmetric_nat(examined["h2"], world.address["h2"], world.address["coord"])


class Doctor:
    """`hetnode doctor` with the credentials of a node that does not run, on its host."""

    def __init__(self, swarm: NetworkSwarm, world: World, name: str, *options: str) -> None:
        known = folder_of(swarm.folder / name / "identity.key", swarm.run_id)
        command = (sys.executable, "-m", "node", "doctor", str(known), "--json", *options)
        self._process = subprocess.Popen(
            world.command(name, command),
            env={**os.environ, "XDG_DATA_HOME": str(swarm.folder / name / "data")},
            stdout=subprocess.PIPE,
        )

    def findings(self) -> dict[str, dict[str, str]]:
        output, _ = self._process.communicate(timeout=120)
        assert self._process.returncode == 0
        return {each["subject"]: each for each in json.loads(output)}


def assert_a_home_that_is_reached(found: dict[str, dict[str, str]], public: str) -> None:
    for subject in ("links", "payloads"):
        assert f"reachable: the coordinator connects to this machine at {public}:" in found[subject]["found"]
    assert "(UPnP)" in found["router"]["found"]
    assert f"connections leave as {public} and keep their port" in found["NAT"]["found"]
    assert "not needed" in found["relay"]["found"]


def assert_a_home_behind_symmetric_nat(found: dict[str, dict[str, str]], own: str, relay: str) -> None:
    for subject in ("links", "payloads"):
        assert f"not reachable from the coordinator at {own}:" in found[subject]["found"]
        assert found[subject]["severity"] == "warning"
    assert "--advertise" in found["links"]["remedy"]
    assert "each with another port" in found["NAT"]["found"]
    assert f"a node here goes through {relay}:" in found["relay"]["found"]
    assert "ms there and back" in found["relay"]["found"]
