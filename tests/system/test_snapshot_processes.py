"""Snapshots of the embedding between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.commands import hetnode
from tests.support.processes import ProcessSwarm

pytestmark = pytest.mark.swarm

MIXED = {"a": Role.REPLICA, "b": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}


@pytest.mark.slow  # the virtual swarm plays the same in seconds
def test_a_member_that_was_killed_fetches_the_active_snapshot_and_all_anchors_agree(tmp_path: Path) -> None:
    spec = spec_of(2, 2, 1, rounds=10_000, inner__steps=20, link__embedding_every=3)
    with ProcessSwarm(spec, tmp_path, MIXED) as swarm:
        swarm.start()

        def have_snapshots(after: int) -> bool:
            """Whether both members of the pipeline keep one of a later round: made, or fetched."""
            files = {name: tmp_path.glob(f"**/{name}/**/snapshots/round-*") for name in "pq"}
            rounds = {name: [int(path.name.split("-")[1]) for path in found] for name, found in files.items()}
            return all(max(each, default=0) > after for each in rounds.values())

        swarm.keep_running_until(lambda: have_snapshots(0), 180, "snapshots")
        for name in ("p", "q"):
            swarm.kill(name)
        last = max(max(swarm.contributions(name)) for name in "ab")
        for name in ("p", "q"):
            swarm.start_node(name)
        swarm.keep_running_until(lambda: have_snapshots(last), 180, "snapshots after the return")
        swarm.keep_running_until(
            lambda: all(max(swarm.contributions(name)) > last for name in MIXED), 180, "all payloads"
        )
        assert not swarm.events("diverged")
        assert "anchors agree" in hetnode("status", str(swarm.run), check=True).stdout
