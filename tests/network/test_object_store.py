"""An object store in the small internet: a newcomer to whom no peer sends a byte, and what homes send."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.network.swarm import NetworkSwarm
from tests.network.world import World
from tests.support.object_store import BUCKET, LOCATION, MOTO, credentials
from tests.support.waiting import wait_until

NO_RELAY = ("--relay", "none")


@contextmanager
def store_in(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store on the host "store", which the coordinator may use."""
    endpoint = f"http://{world.address['store']}:9000"
    command = world.command("store", [*MOTO, "-H", "0.0.0.0", "-p", "9000"])
    for name, value in credentials(endpoint).items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    make = f"import boto3; boto3.client('s3').create_bucket(Bucket={BUCKET!r})"
    try:
        made = world.command("coord", [sys.executable, "-c", make])
        wait_until(
            lambda: subprocess.run(made, check=False, capture_output=True).returncode == 0, 60, "no store"
        )
        yield
    finally:
        process.kill()
        process.wait()


def test_a_newcomer_boots_and_trains_though_no_peer_sends_it_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {name: (Role.REPLICA, ()) for name in ("a", "b", "c")}
    spec = spec_of(
        2, 2, 0, rounds=60, inner__steps=100, recovery__checkpoint_every=10, recovery__keep_rounds=30
    )
    with (
        World(["coord", "store", *members]) as world,
        store_in(world, monkeypatch),
        NetworkSwarm(spec, tmp_path, world, members) as swarm,
    ):
        for peer in ("a", "b"):
            world.run("c", f"iptables -A INPUT -s {world.address[peer]} -j DROP")
        swarm.start_coordinator(*NO_RELAY, "--objects", LOCATION)
        for name in ("a", "b"):
            swarm.start_node(name)
        swarm.wait_until(
            lambda: all(
                f"the store has stage {stage}" in swarm.log("a") + swarm.log("b") for stage in (0, 1)
            ),
            300,
            "the anchors in the store",
        )
        swarm.start_node("c")
        swarm.wait_contributions("c", seconds=300)
        assert "loading stage 0 of round" in swarm.log("c")
        swarm.wait_over(300, *members)
        assert swarm.anchors("a") == swarm.anchors("b") == swarm.anchors("c")
