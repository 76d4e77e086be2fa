"""A paused run with production nodes on a virtual clock: all wait, none is lost, and all go on together."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.run.state.commands import PauseRun
from coordinator.run.state.events import AnchorDiverged, PayloadOffered, PeerLost, PeerRetreated
from protocol.types import PausedBy, Role
from tests.virtual.scenario import FULL, MIXED, Play, contributions, departures, resume
from tests.virtual.swarm import VirtualSwarm


async def pause_before(swarm: VirtualSwarm, number: int) -> None:
    """Pause the run while round `number` - 1 is open, and wait until that has ended."""
    await swarm.until_round(number - 1)
    await swarm.coordinator.command_loop.execute(PauseRun(PausedBy.OPERATOR, "a test"))
    await swarm.until_round(number)
    assert swarm.state.is_held


@pytest.mark.parametrize("overlap", [0, 1])
def test_nobody_trains_during_a_long_pause_and_all_go_on_after_it(play: Play, overlap: int) -> None:
    async def paused(swarm: VirtualSwarm) -> None:
        await pause_before(swarm, 3)
        await asyncio.sleep(60)
        offers = len(swarm.happened(PayloadOffered))
        await asyncio.sleep(900)
        assert len(swarm.happened(PayloadOffered)) == offers
        assert swarm.state.current_round == 3
        await resume(swarm)

    swarm = play.to_the_end(paused, MIXED, rounds=5, **{"outer.overlap": overlap})
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    assert all(contributions(swarm, name) == swarm.rounds for name in MIXED)
    assert not swarm.happened(PeerLost, PeerRetreated, AnchorDiverged)


def test_a_pause_outlives_the_coordinator_and_nodes_which_come_back_and_wait(play: Play) -> None:
    async def paused(swarm: VirtualSwarm) -> None:
        await pause_before(swarm, 3)
        swarm.coordinator.kill()
        swarm.kill("b")
        await asyncio.sleep(120)
        await swarm.coordinator.start()
        assert swarm.state.is_held
        swarm.start("b")
        await asyncio.sleep(200)
        assert swarm.state.current_round == 3
        await resume(swarm)

    swarm = play.to_the_end(paused)
    assert swarm.committed(0) == swarm.rounds
    assert contributions(swarm, "b")[-1] == 6


def test_peers_join_and_leave_during_a_pause_and_the_next_round_has_those_who_are_there(play: Play) -> None:
    async def paused(swarm: VirtualSwarm) -> None:
        await pause_before(swarm, 3)
        swarm.start("c")
        swarm.drain("q")
        await swarm.until_over("q", seconds=60)
        assert departures(swarm, "q") == ["drained"]
        await asyncio.sleep(300)
        await resume(swarm)

    swarm = play.to_the_end(paused, MIXED, rounds=5, later={"c": Role.REPLICA}, ending="abc")
    assert contributions(swarm, "c") == [3, 4, 5]
    assert contributions(swarm, "p") == [1, 2]
    assert swarm.committed(0) == swarm.rounds


def test_a_node_shows_that_it_waits_for_the_end_of_the_pause(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await pause_before(swarm, 2)
        await asyncio.sleep(60)
        assert caplog.text.count("waiting for the end of the pause before round 2") == 3
        assert "the run is paused before round 2 by its operator: a test" in caplog.text
        await resume(swarm)
        await asyncio.sleep(1)
        assert caplog.text.count("the run is no longer paused") == 3

    caplog.set_level("INFO")
    play(scenario, FULL)
