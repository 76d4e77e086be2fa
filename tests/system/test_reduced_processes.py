"""Replicas that reduce payloads in parts, as real processes."""

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
def test_a_reducer_that_was_killed_applies_the_results_of_the_others_and_reduces_again(
    tmp_path: Path,
) -> None:
    spec = spec_of(2, 2, 1, rounds=10_000, inner__steps=20, outer__exchange="reduced")
    with ProcessSwarm(spec, tmp_path, MIXED) as swarm:
        swarm.start()
        swarm.keep_running_until(lambda: len(swarm.decisions()) > 4, 180, "the first rounds")
        swarm.keep_running_until(
            lambda: all(max(swarm.contributions(name), default=0) > 2 for name in MIXED), 180, "all payloads"
        )
        swarm.kill("b")
        last = max(max(swarm.contributions(name)) for name in "ab")
        swarm.wait_until(
            lambda: max(swarm.contributions("a")) > last + 2, 180, "rounds without the killed one"
        )
        swarm.start_node("b")
        later = max(swarm.contributions("a"))
        swarm.keep_running_until(
            lambda: all(max(swarm.contributions(name)) > later for name in MIXED), 180, "all payloads again"
        )
        assert not swarm.events("diverged")
        assert "anchors agree" in hetnode("status", str(swarm.run), check=True).stdout
