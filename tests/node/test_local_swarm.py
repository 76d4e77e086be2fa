"""A swarm on one machine: which nodes it starts."""

from __future__ import annotations

import pytest

from node.local_swarm import roles_to_start
from protocol.types import Role
from tests.builders import spec_of


@pytest.mark.parametrize(("members", "stage_peers"), [(0, 8), (3, 6)])
def test_a_swarm_starts_as_many_nodes_as_its_run_needs(members: int, stage_peers: int) -> None:
    """Where pipelines have fewer members than stages, too: the run would refuse the others."""
    spec = spec_of(stages=4, replicas=1, pipelines=2, swarm__members=members)
    assert roles_to_start(spec) == [Role.REPLICA] + [Role.STAGE] * stage_peers
