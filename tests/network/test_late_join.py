"""A late joiner over lines as homes have them: from several donors, through breaks, and what all costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.builders import spec_of
from tests.network.swarm import NetworkSwarm
from tests.network.world import World

pytestmark = pytest.mark.slow
JOINER = "j"
EVERY = 8
DONORS = {"a": 20.0, "b": 20.0, "c": 40.0}
"""Mb/s that each sends; all receive 100, as the joiner does."""


def wide(layers: int) -> RunSpec:
    """A stage of 12.5M parameters for each of the layers, which trains for a moment and commits often."""
    return spec_of(
        stages=1,
        replicas=len(DONORS),
        rounds=1000,
        model__width=1024,
        model__feed_forward=2816,
        model__heads=8,
        model__layers=layers,
        inner__steps=6,
        inner__microbatches=1,
        inner__microbatch_size=1,
        recovery__checkpoint_every=EVERY,
        recovery__keep_rounds=2 * EVERY + 2,
        timing__straggler=1e6,
        timing__match_window=60,
    )


@contextmanager
def running(spec: RunSpec, folder: Path, lines: Mapping[str, float]) -> Iterator[tuple[World, NetworkSwarm]]:
    """A swarm of the donors that has a checkpoint, and room for the joiner."""
    names = [*DONORS, JOINER]
    members = {name: (Role.REPLICA, ()) for name in names}
    with World(["coord", *names]) as world, NetworkSwarm(spec, folder, world, members) as swarm:
        for name, up in {JOINER: 20.0, **lines}.items():
            world.shape(name, up, down=100.0)
        swarm.start_coordinator("--relay", "none")
        for name in DONORS:
            swarm.start_node(name)
        swarm.wait_round(2 * EVERY + 4, 900)  # too late to follow all rounds from the first one on
        yield world, swarm


@pytest.mark.parametrize("layers", [2, 4])
def test_a_join_uses_the_lines_of_all_donors_and_fetches_once(tmp_path: Path, layers: int) -> None:
    spec = wide(layers)
    with running(spec, tmp_path, DONORS) as (world, swarm):
        began, rounds, received = time.monotonic(), swarm.round_number, received_by(world, JOINER)
        swarm.start_node(JOINER)
        marks = {}
        for what, condition in (
            ("asks", lambda: "loading stage 0 of round" in swarm.log(JOINER)),
            ("has all", lambda: has_all(swarm)),
            ("is planned", lambda: " joins: " in swarm.log(JOINER)),
            ("counts", lambda: bool(swarm.contributions(JOINER))),
        ):
            swarm.wait_until(condition, 900, f"the joiner {what}")
            marks[what] = round(time.monotonic() - began, 1), swarm.round_number
            if what == "has all":
                fetched = received_by(world, JOINER) - received
        nbytes, log = 4 * spec.parameters_of(0), swarm.log(JOINER)
        assert log.count("loading stage 0 of round") == 1  # the rounds since are applied, not skipped
        assert fetched < 1.3 * nbytes
        print(f"\n{nbytes / 4e6:.1f}M parameters, {fetched / nbytes:.3f} bytes received for each byte")
        print(f"after seconds, in round: {marks}; {rounds} rounds were before")
        print([line[20:] for line in log.splitlines() if "MB in" in line])
        ends = [(each["round"], each["time"]) for each in swarm.decisions()]
        print([(number, round(end - start, 1)) for (_, start), (number, end) in pairwise(ends)])


def test_a_join_goes_on_after_each_break(tmp_path: Path) -> None:
    """A donor that dies, a line that is dead for a while, and a joiner that is killed."""
    spec = wide(2)
    nbytes = 4 * spec.parameters_of(0)
    with running(spec, tmp_path, {name: rate / 2 for name, rate in DONORS.items()}) as (world, swarm):
        received = received_by(world, JOINER)

        def wait_share(share: float) -> None:
            swarm.wait_until(
                lambda: received_by(world, JOINER) - received > share * nbytes, 300, f"{share} of the anchor"
            )

        swarm.start_node(JOINER)
        wait_share(0.2)
        swarm.kill("c")
        wait_share(0.3)
        swarm.start_node("c")
        wait_share(0.4)
        world.unplug(JOINER)
        before = received_by(world, JOINER)
        swarm.wait_round(swarm.round_number + 3, 300)  # of the donors, about ten seconds
        assert received_by(world, JOINER) - before < 0.01 * nbytes
        world.plug(JOINER)
        wait_share(0.7)
        swarm.kill(JOINER)
        swarm.start_node(JOINER)
        swarm.wait_log(JOINER, "chunks are here already", 300)
        swarm.wait_until(lambda: has_all(swarm), 300, "the end of the download")
        share = (received_by(world, JOINER) - received) / nbytes
        print(f"\n{share:.2f} bytes received for each")
        print([line[20:] for line in swarm.log(JOINER).splitlines() if "stage 0" in line])
        assert share < 1.6


def has_all(swarm: NetworkSwarm) -> bool:
    """Whether the joiner has all bytes of its anchor."""
    return any("MB in" in line and "more" not in line for line in swarm.log(JOINER).splitlines())


def received_by(world: World, host: str) -> int:
    """The bytes that a host has received so far."""
    (line,) = (each for each in world.run(host, "cat /proc/net/dev").splitlines() if "wan:" in each)
    return int(line.partition(":")[2].split()[0])
