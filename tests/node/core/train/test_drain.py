"""Nodes that drain finish their round, keep their progress, and delay no other node."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.run.state.events import PeerDraining, PeerLost, PeerRetreated
from node.core.train.pipeline import Pipeline
from node.net.coordinator_client import CoordinatorClient
from node.net.joining import announce_leaving
from node.net.link import LiveLink
from node.net.membership import Membership
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Role
from tests.virtual.network import current_machine
from tests.virtual.scenario import FULL, MIXED, Play, contributions, departures, swarm_spec
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.transport import VirtualPackage


def adam_steps(swarm: VirtualSwarm, name: str) -> int:
    """Inner steps of the node in all, by its newest checkpoint."""
    task = swarm.nodes[name].task
    assert task is not None
    private = json.loads((task.result() / "private" / "private.json").read_text())
    (steps,) = {stage["moments"]["steps"] for stage in private["stages"].values()}
    return int(steps)


def no_peer_was_lost(swarm: VirtualSwarm) -> bool:
    return not any(isinstance(event, PeerLost | PeerRetreated) for event in swarm.events)


def test_a_full_replica_that_drains_finishes_its_round_and_the_others_continue(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.drain("b")
        await swarm.until_over("b", seconds=20)
        assert departures(swarm, "b") == ["drained"]
        await swarm.until_over()
        swarm.assert_all_agree("a", "c")
        assert contributions(swarm, "b") == [1, 2, 3]
        assert swarm.committed(0) == [1, 2, 3, 4, 5]
        assert no_peer_was_lost(swarm)
        assert [event.peer for event in swarm.events if isinstance(event, PeerDraining)] == [swarm.peer("b")]

    play(scenario, spec=swarm_spec(FULL, rounds=5))


@pytest.mark.parametrize("name", ["p", "q"])
def test_a_member_of_a_pipeline_that_drains_finishes_its_round(play: Play, name: str) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.drain(name)
        await swarm.until_over(name, seconds=20)
        assert contributions(swarm, "p") == contributions(swarm, "q") == [1, 2, 3]
        other = "q" if name == "p" else "p"
        await swarm.until_over("a", "b", other)
        swarm.assert_all_agree("a", "b", other)
        assert swarm.committed(1) == [1, 2, 3, 4, 5]
        assert no_peer_was_lost(swarm)  # its neighbour saw an orderly end of the link

    play(scenario, MIXED, swarm_spec(MIXED, rounds=5))


def test_a_member_that_drains_after_the_next_plan_was_made_closes_its_links_in_order(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate, part = Pipeline.validate, LiveLink.part
    parted: list[str] = []

    async def scenario(swarm: VirtualSwarm) -> None:
        async def ask_then_validate(self: Pipeline, round_number: int) -> float:
            if (current_machine(), round_number) == ("p", 3):
                swarm.drain("p")
            return await validate(self, round_number)

        async def note_then_part(self: LiveLink, deadline: float) -> None:
            parted.append(current_machine())
            await part(self, deadline)

        async def ignored(self: CoordinatorClient, reason: str) -> None:
            pass

        monkeypatch.setattr(Pipeline, "validate", ask_then_validate)
        monkeypatch.setattr(LiveLink, "part", note_then_part)
        monkeypatch.setattr(CoordinatorClient, "drain", ignored)
        swarm.start()
        await swarm.until_over("p", seconds=100)
        assert parted == ["p"]  # its neighbour may need the link for its validation until then
        assert contributions(swarm, "p") == [1, 2, 3]
        await swarm.until_over("a", "b")

    play(scenario, MIXED)


def test_a_drained_node_continues_from_its_checkpoint_when_it_is_started_again(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        swarm.drain("b")
        await swarm.until_over("b", seconds=20)
        kept = swarm.nodes["b"].folder / "checkpoint" / f"round-{max(contributions(swarm, 'b')):06d}"
        assert kept.exists()
        swarm.start("b")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b")[-1] == 8

    play(scenario, spec=swarm_spec(FULL, rounds=8))


def test_a_spare_that_drains_leaves_at_once(play: Play) -> None:
    members = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE, "spare": Role.STAGE}
    spec = swarm_spec({name: members[name] for name in "apq"}, rounds=6)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "p", "q")
        await swarm.until_round(2)
        swarm.start("spare")
        await swarm.until_round(4)
        asked = swarm.loop.time()
        swarm.drain("spare")
        await swarm.until_over("spare")
        assert swarm.loop.time() - asked < 0.5  # a round takes several times as long
        assert departures(swarm, "spare") == ["drained"]
        await swarm.until_over()
        swarm.assert_all_agree("a", "p", "q")
        assert contributions(swarm, "p") == [1, 2, 3, 4, 5, 6]

    play(scenario, members, spec)


def test_a_node_that_drains_before_the_run_starts_leaves_at_once(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "b")
        await swarm.until(lambda state: len(state.peers) == 2)
        await asyncio.sleep(5)
        swarm.drain("b")
        await swarm.until_over("b", seconds=5)
        assert departures(swarm, "b") == ["drained"]

    play(scenario)


def test_a_node_that_waits_for_its_coordinator_leaves_at_once(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.coordinator.kill()
        swarm.start("b")
        await asyncio.sleep(5)
        assert swarm.nodes["b"].is_running
        swarm.drain("b")
        await swarm.until_over("b", seconds=3)
        assert not swarm.nodes["b"].errors

    play(scenario)


def test_a_node_that_is_entering_the_dht_tells_the_coordinator_and_leaves_at_once(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("b")
        await swarm.until(lambda state: len(state.peers) == 1)
        await asyncio.sleep(5)
        swarm.drain("b")
        await swarm.until_over("b", seconds=3)
        assert departures(swarm, "b") == ["drained"]

    async def hang(self: VirtualPackage, *_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(VirtualPackage, "start", hang)
    play(scenario)


def test_a_node_that_drains_without_a_coordinator_keeps_its_progress_and_leaves_at_once(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.coordinator.kill()
        swarm.drain("b")
        await swarm.until_over("b", seconds=10)
        steps = adam_steps(swarm, "b")
        assert 2 * swarm.spec.inner.steps < steps < 3 * swarm.spec.inner.steps  # in the middle of round 3
        await swarm.coordinator.start()
        swarm.start("b")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == list(range(1, 9))
        assert 3 not in contributions(swarm, "b")
        assert contributions(swarm, "b")[-1] == 8

    play(scenario, spec=swarm_spec(FULL, rounds=8))


def test_a_node_leaves_at_once_when_the_coordinator_goes_away_while_it_drains(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.drain("b")
        await asyncio.sleep(0.2)
        assert swarm.nodes["b"].is_running
        swarm.coordinator.kill()
        await swarm.until_over("b", seconds=10)
        assert adam_steps(swarm, "b") > 2 * swarm.spec.inner.steps

    play(scenario)


async def test_a_node_that_joins_again_while_it_drains_announces_the_drain_again() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    class Coordinator:
        async def drain(self, reason: str) -> None:
            told.put_nowait(reason)
            if told.qsize() > 1:
                raise HetnodeError(ErrorCode.UNKNOWN_PEER, "This peer has not joined.", "")

    coordinator: Any = Coordinator()
    leaving = asyncio.Event()

    async def join() -> None:
        pass

    membership = Membership(coordinator, join, heartbeat=1.0)
    announcing = asyncio.create_task(announce_leaving(leaving, coordinator, membership))
    leaving.set()
    async with asyncio.timeout(120):
        for _ in range(3):
            await told.get()
            await membership.rejoin(membership.run_view.session)
        await told.get()
    announcing.cancel()
