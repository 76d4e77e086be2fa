"""Links through a relay between homes that others cannot dial."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.network.relay_ends import CALLER, FRAME_BYTES, FRAMES, RELAY, write_credentials
from tests.network.world import Home, Nat, World

HTTPS = 443
# Both have the same private address, and their routers let out nothing but HTTPS.
HOMES = {
    "h1": Home(address="192.168.1.10", ports=(HTTPS,)),
    "h2": Home(Nat.RANDOM, address="192.168.1.10", ports=(HTTPS,)),
}
LINE_MBIT = 20.0


class Process:
    """A role of tests.network.relay_ends on one host."""

    def __init__(self, world: World, host: str, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.network.relay_ends", str(folder), *arguments]
        self._process = subprocess.Popen(world.command(host, command), stdout=subprocess.PIPE, text=True)

    def news(self) -> Mapping[str, Any]:
        """The next thing that it tells."""
        assert self._process.stdout is not None
        found: Mapping[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def kill(self) -> None:
        """May be called again."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def running(*arguments: Any) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.kill()


def test_a_link_through_a_relay(tmp_path: Path) -> None:
    """Two homes, HTTPS only, shaped lines; then the relay is killed for five seconds."""
    write_credentials(tmp_path, RELAY, CALLER, "home")
    with World(["relay"], HOMES) as world:
        at = f"{world.address['relay']}:{HTTPS}"
        relay_of = ("relay", tmp_path, "relay", at, "7801-7810")
        with running(world, *relay_of) as relay:
            assert relay.news()["ready"] == HTTPS
            with running(world, "h1", tmp_path, "home", at, "home") as home:
                dht_port = home.news()["dht_port"]
                assert 7801 <= dht_port <= 7810
                for line in ("h1", "h2"):
                    world.shape(line, LINE_MBIT)
                with running(world, "h2", tmp_path, "caller", at, "home") as caller:
                    assert caller.news()["opened"] > 0
                    found = home.news()
                rate = (FRAMES - 1) * FRAME_BYTES / found["seconds"]
                print(f"a relayed link over lines of {LINE_MBIT:g} Mb/s: {rate * 8e-6:.2f} Mb/s")
                assert rate >= 0.9 * LINE_MBIT * 1e6 / 8

                relay.kill()
                time.sleep(5.0)  # what is tested is an absence of this length
                with running(world, *relay_of) as again:
                    assert again.news()["ready"] == HTTPS
                    began = time.monotonic()
                    assert home.news()["dht_port"] == dht_port
                    print(f"found again after {time.monotonic() - began:.1f} s")
                    with running(world, "h2", tmp_path, "caller", at, "home"):
                        assert home.news()["seconds"] > 0
