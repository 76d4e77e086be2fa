"""Every test here is marked `containers`, and is skipped with a reason where there is no container engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.swarm import ContainerSwarm, build, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.containers)


@pytest.fixture(scope="session")
def image() -> str:
    """The image of this checkout."""
    if reason := missing():
        pytest.skip(reason)
    return build()


@pytest.fixture
def swarm(image: str) -> Iterator[ContainerSwarm]:
    """No container runs yet. Afterwards neither containers nor volumes are left."""
    swarm = ContainerSwarm(image)
    swarm.compose("down", "--volumes", "--remove-orphans")
    try:
        yield swarm
    finally:
        print(swarm.logs())
        swarm.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
