"""One swarm for all attacks of this folder, and peers that attack it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.hostile.peer import Peer
from tests.hostile.training.swarm import joined, training_swarm
from tests.support.processes import ProcessSwarm


@pytest.fixture(scope="package")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    with training_swarm(tmp_path_factory.mktemp("training") / "swarm") as started:
        yield started


@pytest.fixture
async def attacker(swarm: ProcessSwarm) -> AsyncIterator[Peer]:
    """It has joined as a full replica, and sends heartbeats."""
    async for peer in joined(swarm):
        yield peer


@pytest.fixture
async def scout(swarm: ProcessSwarm) -> AsyncIterator[Peer]:
    """Another one, which finds out the digests of honest anchors."""
    async for peer in joined(swarm):
        yield peer
