"""A swarm in which everything listens on, and dials, an IPv6 address."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.builders import spec_of
from tests.support.ports import has_ipv6_loopback
from tests.support.processes import ProcessSwarm

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback address"),
]


class IPv6Swarm(ProcessSwarm):
    def __init__(self, spec: RunSpec, folder: Path, members: dict[str, Role]) -> None:
        super().__init__(spec, folder, members)
        self._address = "[::1]:0"

    def network_options(self, name: str) -> Sequence[str]:
        return ("--listen", "[::1]:0")  # the address towards the coordinator is advertised


def test_a_pipeline_on_ipv6_alone(tmp_path: Path) -> None:
    members = {"a": Role.STAGE, "b": Role.STAGE}
    with IPv6Swarm(spec_of(2, 0, 1, rounds=1), tmp_path, members) as swarm:
        swarm.start()
        swarm.wait_over(120, *members)
        assert all(each["committed"] for each in swarm.decisions())
        for name in members:
            assert "others reach this node at [::1]:" in swarm.log(name)
