"""The world of these tests is like the internet: who reaches whom, from which address, and how fast."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.network.world import Home, Nat, World
from tests.support.waiting import wait_until

# Prints the address of each caller, sends it what it asks for, and tells it the port it comes from.
SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    client, (host, port) = server.accept()
    with client:
        wanted = int(client.makefile().readline())
        client.sendall(f"{host} {port}\\n".encode() + bytes(wanted))
"""
CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 3) as client:
        client.sendall(sys.argv[3].encode() + b"\\n")
        stream = client.makefile("rb")
        print(stream.readline().decode().strip())
        stream.read()
except OSError as error:
    print("error:", error)
"""


def call(world: World, host: str, address: str, *, port: int = 7000, wanted: int = 0) -> str:
    command = [sys.executable, "-c", CLIENT, address, str(port), str(wanted)]
    return subprocess.run(
        world.command(host, command), capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    homes = {"h1": Home(), "h2": Home(Nat.RANDOM), "h3": Home(address="192.168.1.10", ports=(443,))}
    with World(["a", "b"], homes) as world:
        servers = [
            subprocess.Popen(world.command(host, [sys.executable, "-c", SERVER]), stdout=subprocess.PIPE)
            for host in ("a", "h1")
        ]
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
        yield world
        for server in servers:
            server.kill()
            server.communicate()


def test_public_hosts_and_homes_reach_a_public_host(world: World) -> None:
    for host in ("b", "h1", "h2"):
        assert call(world, host, world.address["a"]).split()[0] == world.seen_as[host]


def test_nobody_reaches_a_home(world: World) -> None:
    for caller in ("a", "h2"):
        assert "error" in call(world, caller, world.address["h1"])
        assert "error" in call(world, caller, world.seen_as["h1"])


def test_a_router_may_let_out_some_ports_only(world: World) -> None:
    assert "refused" in call(world, "h3", world.address["a"])  # by the router
    assert world.address["h3"] == world.address["h1"]


def test_a_shaped_line_has_its_rate(world: World) -> None:
    world.shape("h2", 20)
    try:
        began = time.monotonic()
        call(world, "h2", world.address["a"], wanted=2_500_000)
        # A bound from below: no machine is too slow for it. The burst of the bucket is 20 kB.
        assert time.monotonic() - began > 0.9
    finally:
        world.unshape("h2")


def test_addresses_change_and_lines_are_unplugged(world: World) -> None:
    world.move_home("h2", "192.168.1.77")
    world.move_router("h2", "44.10.0.200")
    assert call(world, "h2", world.address["a"]).startswith("44.10.0.200 ")
    world.unplug("h2")
    assert "error" in call(world, "h2", world.address["a"])
    world.plug("h2")
    wait_until(lambda: call(world, "h2", world.address["a"]).startswith("44.10.0.200 "), 30, "a connection")
    world.move_public("a", "44.10.0.99")
    assert call(world, "b", "44.10.0.99").startswith(world.address["b"])


def test_a_forwarded_port_reaches_the_home(world: World) -> None:
    world.forward("h1", 7000)
    assert call(world, "b", world.seen_as["h1"]).startswith(world.address["b"])
