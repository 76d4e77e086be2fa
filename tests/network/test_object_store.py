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
SIZES = {"model__width": 256, "model__feed_forward": 512, "outer__top_k": 4096, "inner__steps": 3}


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


@pytest.mark.slow
@pytest.mark.parametrize("lines", ["all", "one"])
def test_homes_send_each_payload_once_through_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    """`lines`: "all" replicas are homes that send 10 Mb/s and receive 100, or "one" is, among fast ones."""
    names = [f"r{number}" for number in range(5)]
    homes = names if lines == "all" else names[:1]
    members = {name: (Role.REPLICA, ()) for name in names}
    spec = spec_of(1, len(names), 0, rounds=12, **SIZES)
    sent, seconds = {}, {}
    for kind in ("peers", "store"):
        with (
            World(["coord", "store", *names]) as world,
            store_in(world, monkeypatch),
            NetworkSwarm(spec, tmp_path / kind, world, members) as swarm,
        ):
            for home in homes:
                world.run(home, "tc qdisc add dev wan root tbf rate 10mbit burst 20kb latency 400ms")
            swarm.start_coordinator(*NO_RELAY, *(("--objects", LOCATION) if kind == "store" else ()))
            for name in names:
                swarm.start_node(name)
            swarm.wait_round(3, 300)
            before = sent_by(world, homes[0])
            swarm.wait_round(11, 300)
            sent[kind] = (sent_by(world, homes[0]) - before) / 8
            ends = {each["round"]: each["time"] for each in swarm.decisions()}
            seconds[kind] = (ends[11] - ends[3]) / 8
            swarm.wait_over(300, *members)
            assert not swarm.aborted
    ratio = seconds["peers"] / seconds["store"]
    print(f"{lines}: bytes of a home in a round {sent}, seconds {seconds}, ratio {ratio:.2f}")
    assert sent["store"] < sent["peers"] / 2


def sent_by(world: World, host: str) -> int:
    """The bytes that a host has sent so far."""
    (line,) = (each for each in world.run(host, "cat /proc/net/dev").splitlines() if "wan:" in each)
    return int(line.partition(":")[2].split()[8])
