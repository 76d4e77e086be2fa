"""Runs whose links derive T_perp from snapshots of the embedding."""

from __future__ import annotations

import pytest

from coordinator.state.events import DigestAttested
from protocol.types import Part
from tests.virtual.scenario import MIXED, Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

EVERY = 2


@pytest.fixture(autouse=True)
def nodes_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes still refuse such runs outside tests."""
    monkeypatch.setattr("node.worker.worker.check_runnable", lambda spec: None)


def attested(swarm: VirtualSwarm, part: Part) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for event in swarm.events:
        if isinstance(event, DigestAttested) and event.part == part:
            found.setdefault(event.round_number, set()).add(event.digest)
    return found


@pytest.mark.parametrize("overlap", [0, 1])
def test_members_without_stage_0_train_with_snapshots_that_they_fetch(play: Play, overlap: int) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        rounds = list(range(1, swarm.spec.rounds + 1))
        assert swarm.committed(0) == swarm.committed(1) == rounds
        assert all(contributions(swarm, name) == rounds for name in MIXED)
        made, copied = attested(swarm, Part.SNAPSHOT), attested(swarm, Part.COPY)
        assert all(len(digests) == 1 for digests in made.values())
        assert {2, 4} <= made.keys()
        assert {2, 4} <= copied.keys()
        assert all(made[each] == digests for each, digests in copied.items())
        assert not attested(swarm, Part.EMBEDDING)

    spec = swarm_spec(MIXED, **{"link.embedding_every": EVERY, "outer.overlap": overlap})
    play(scenario, MIXED, spec)
