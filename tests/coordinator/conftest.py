"""Runs of a coordinator without IO, with peers that have joined."""

from __future__ import annotations

import pytest

from protocol.types import Role
from tests.builders import spec_of
from tests.support.coordinator_run import Run, joined_run


@pytest.fixture
def run() -> Run:
    """Two full replicas of two stages; three rounds."""
    return joined_run(spec_of(), Role.REPLICA, Role.REPLICA)


@pytest.fixture
def mixed() -> Run:
    """A full replica and a pipeline of two members; three rounds."""
    return joined_run(spec_of(2, 1, 1), Role.REPLICA, Role.STAGE, Role.STAGE)
