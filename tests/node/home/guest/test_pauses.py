"""Nodes that pause leave their run in order, keep their place and their progress, and come back."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.run.state.events import PeerDraining, PeerLost
from node.folder import node_folder_of, run_in
from node.security.credentials import folder_of
from protocol.types import Role
from tests.virtual.scenario import FULL, Play, contributions, departures, swarm_spec
from tests.virtual.swarm import VirtualSwarm


async def until_it_rests(swarm: VirtualSwarm, name: str, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while swarm.guest(name).is_here:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def test_a_paused_node_finishes_its_round_rests_and_comes_back(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        place = swarm.state.assignment(swarm.peer("b"), 3)
        swarm.guest("b").pause()
        await until_it_rests(swarm, "b")
        assert departures(swarm, "b") == ["drained"]
        await swarm.until_round(5)
        assert swarm.nodes["b"].is_running
        assert contributions(swarm, "b") == [1, 2, 3]
        swarm.guest("b").resume()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert max(contributions(swarm, "b")) == 10
        assert place is not None
        found = swarm.state.assignment(swarm.peer("b"), 10)
        assert found is not None
        assert found.replica.index == place.replica.index
        assert not any(isinstance(event, PeerLost) for event in swarm.events)

    play(scenario, spec=swarm_spec(FULL, rounds=10))


def test_a_node_that_is_paused_when_it_starts_takes_part_only_after_it_is_resumed(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        (swarm.nodes["b"].folder / "paused").touch()
        swarm.start("a", "b")
        await asyncio.sleep(30)
        assert len(swarm.state.peers) == 1
        own = swarm.nodes["b"]
        # Commands find it by this, although it has never joined.
        assert node_folder_of(folder_of(own.identity.path, swarm.coordinator.run)) == own.folder
        assert run_in(own.folder) == swarm.coordinator.run
        swarm.guest("b").resume()
        assert not (swarm.nodes["b"].folder / "paused").exists()
        await swarm.until_over()
        swarm.assert_all_agree()

    play(scenario, {"a": Role.REPLICA, "b": Role.REPLICA})


def test_a_node_that_rests_leaves_at_once_and_still_rests_at_its_next_start(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(2)
        swarm.guest("b").pause()
        await until_it_rests(swarm, "b")
        swarm.drain("b")
        await swarm.until_over("b", seconds=3)
        swarm.start("b")
        await asyncio.sleep(10)
        assert not swarm.guest("b").is_here
        await swarm.until_over("a", "c")

    play(scenario)


@pytest.mark.parametrize(("is_killed", "within"), [(False, 2), (True, 60)])
def test_a_node_that_rests_ends_with_its_run(
    play: Play, caplog: pytest.LogCaptureFixture, is_killed: bool, within: float
) -> None:
    """Also if the coordinator was away meanwhile, and if the node has never taken part."""
    caplog.set_level("INFO")

    async def scenario(swarm: VirtualSwarm) -> None:
        (swarm.nodes["c"].folder / "paused").touch()
        swarm.start()
        await swarm.until_round(3)
        swarm.guest("b").pause()
        await until_it_rests(swarm, "b")
        if is_killed:
            swarm.coordinator.kill()
            await asyncio.sleep(20)
            await swarm.coordinator.start()
        await swarm.until_over("a")
        await swarm.until_over("b", "c", seconds=within)
        assert swarm.nodes["b"].task is not None
        assert swarm.nodes["b"].task.result() is not None
        assert max(contributions(swarm, "b")) < swarm.spec.rounds
        swarm.assert_all_agree("a")

    play(scenario, dict.fromkeys("abc", Role.REPLICA), spec=swarm_spec(dict.fromkeys("ab", Role.REPLICA)))
    assert caplog.text.count("the run is finished; this node's part of the model is in") == 3
    assert caplog.text.count("the run has ended while this node rested") == 2


def test_a_pause_at_once_keeps_the_progress_and_is_no_failure(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)  # now it trains
        swarm.guest("b").pause()
        await asyncio.sleep(0.1)
        swarm.guest("b").pause(0.05)
        await until_it_rests(swarm, "b", seconds=5)
        assert contributions(swarm, "b") == [1, 2]
        assert [event.peer for event in swarm.events if isinstance(event, PeerDraining)] == [swarm.peer("b")]
        assert not swarm.state.failures

    play(scenario)


def test_a_node_pauses_at_once_while_its_coordinator_is_away(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.coordinator.kill()
        swarm.guest("b").pause()
        await until_it_rests(swarm, "b", seconds=10)
        assert swarm.nodes["b"].is_running

    play(scenario)
