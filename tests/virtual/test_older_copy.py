"""A coordinator that was restored from an older copy of its folder: nodes wait for the newest one."""

from __future__ import annotations

import asyncio
import copy

import pytest

from coordinator.status.causes import peer_cause
from protocol.status import CauseCode
from tests.virtual.scenario import Play
from tests.virtual.swarm import VirtualSwarm


def test_nodes_that_know_more_than_their_coordinator_wait_and_keep_what_they_have(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(2)
        older = copy.deepcopy(swarm.coordinator.store)
        await swarm.until_round(5)
        swarm.coordinator.kill()
        newest, swarm.coordinator.store = swarm.coordinator.store, older
        await swarm.coordinator.start()
        await asyncio.sleep(60)
        swarm.kill("b")  # its next start finds its checkpoint ahead of the run
        swarm.start("b")
        await asyncio.sleep(120)
        assert all(node.is_running and not node.errors for node in swarm.nodes.values())
        assert swarm.state.current_round == 2
        causes = [peer_cause(swarm.state, swarm.peer(name)) for name in ("a", "c")]
        assert [cause and cause.code for cause in causes] == [CauseCode.COORDINATOR_BEHIND] * 2
        swarm.coordinator.kill()
        swarm.coordinator.store = newest
        await swarm.coordinator.start()
        await swarm.until_over()
        swarm.assert_all_agree()

    play(scenario)
    assert "[coordinator-behind]" in caplog.text
    assert "parameters before" not in caplog.text
