"""A real ``hetnode coordinator`` process under attack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import spec_of
from tests.hostile.target import Target
from tests.support.processes import ProcessSwarm


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with ProcessSwarm(spec_of(), tmp_path, {}) as swarm:
        swarm.start_coordinator("--certificate-life", "60s")
        yield Target(swarm)
