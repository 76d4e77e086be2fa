"""Rollbacks with production nodes on a virtual clock: all anchors go back bit for bit; training goes on."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.rollback import problem_of
from coordinator.run.state.events import PeerLost
from protocol.types import Role
from tests.virtual.scenario import (
    FULL,
    MIXED,
    Play,
    attested,
    contributions,
    resume,
    roll_back,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm

EVERY_ROUND = {"recovery.checkpoint_every": 1}


def digests_after(swarm: VirtualSwarm, number: int) -> dict[tuple[int, str], set[str]]:
    found: dict[tuple[int, str], set[str]] = {}
    for (stage, its_round, part), digests in swarm.state.digests.items():
        if its_round == number:
            found.setdefault((stage, part), set()).update(digests.values())
    return found


@pytest.mark.parametrize(("restore_round", "overlap"), [(0, 1), (2, 0)])
def test_all_anchors_go_back_bit_for_bit_and_training_goes_on(
    play: Play, restore_round: int, overlap: int
) -> None:
    async def rolled_back(swarm: VirtualSwarm) -> None:
        await swarm.until_round(5)
        before = digests_after(swarm, restore_round)
        number = await roll_back(swarm, restore_round)
        assert number == 5
        assert swarm.state.is_held
        await swarm.until(attested(number, 3), "the rollback")
        await asyncio.sleep(60)
        assert digests_after(swarm, number) == before
        assert all(len(digests) == 1 for digests in before.values())
        assert swarm.state.current_round == 6
        await resume(swarm)

    options = {"outer.overlap": overlap, "outer.optimizer": "nesterov"}
    swarm = play.to_the_end(rolled_back, MIXED, rounds=7, **EVERY_ROUND, **options)
    assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4, 6, 7]
    assert all(contributions(swarm, name)[-2:] == [6, 7] for name in MIXED)
    assert not swarm.diverged()


def test_nodes_that_are_away_or_come_later_take_the_rollback_as_well(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*MIXED)
        await swarm.until_round(4)
        swarm.kill("b", "q")
        await swarm.until(lambda state: bool(swarm.happened(PeerLost)), "b is lost")
        await swarm.until_round(6)
        number = await roll_back(swarm, 2)
        await swarm.until(attested(number, 1), "the rollback")
        swarm.start("b")
        await asyncio.sleep(120)
        await resume(swarm)
        swarm.start("c", "q")
        await swarm.until_over(*swarm.nodes)
        swarm.assert_all_agree("a", "b", "c")
        assert contributions(swarm, "b")[-1] == contributions(swarm, "c")[-1] == 14
        assert not swarm.diverged()

    play(scenario, {**MIXED, "c": Role.REPLICA}, swarm_spec(MIXED, rounds=14, **EVERY_ROUND))


def test_a_node_that_returns_when_nobody_has_the_restored_anchor_loads_a_later_checkpoint(play: Play) -> None:
    async def rolled_back(swarm: VirtualSwarm) -> None:
        await swarm.until_round(6)
        swarm.kill("c")
        number = await roll_back(swarm, 2)
        await resume(swarm)
        await swarm.until_round(number + 9)
        assert problem_of(swarm.state, 2)
        swarm.start("c")

    swarm = play.to_the_end(rolled_back, rounds=20, **EVERY_ROUND, **{"recovery.keep_rounds": 60})
    assert contributions(swarm, "c")[-1] == 20


def test_a_coordinator_that_dies_after_the_decision_goes_on_with_it(play: Play) -> None:
    async def rolled_back(swarm: VirtualSwarm) -> None:
        await swarm.until_round(5)
        number = await roll_back(swarm, 2)
        swarm.coordinator.kill()
        swarm.kill("c")
        await asyncio.sleep(30)
        await swarm.coordinator.start()
        swarm.start("c")
        await swarm.until(attested(number, 3), "the rollback")
        await resume(swarm)

    swarm = play.to_the_end(rolled_back, rounds=8, **EVERY_ROUND)
    assert swarm.state.restored == {5: 2}
    assert not swarm.diverged()


def test_an_anchor_that_nobody_keeps_is_refused_and_another_rollback_helps(play: Play) -> None:
    """All holders lose their disks after the decision: a later rollback needs none of that."""

    async def rolled_back(swarm: VirtualSwarm) -> None:
        await swarm.until_round(6)
        await swarm.until_kept(2)
        for name in FULL:
            for path in (swarm.nodes[name].folder / "checkpoint").glob("round-000002"):
                path.rename(path.with_name("away"))
        number = await roll_back(swarm, 2)
        await asyncio.sleep(100)
        assert digests_after(swarm, number) == {}
        again = await roll_back(swarm, 0)
        await swarm.until(attested(again, 3), "the second rollback")
        assert digests_after(swarm, again) == digests_after(swarm, 0)
        await resume(swarm)

    play.to_the_end(rolled_back, rounds=10, **EVERY_ROUND)


def test_what_can_be_restored_is_what_peers_keep(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(12)
        # Peers have told this since they removed what the checkpoint after round 10 replaced.
        async with asyncio.timeout(60):
            while not all(10 in swarm.state.last_seen[peer].kept for peer in swarm.state.peers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        possible = {number for number in range(12) if not problem_of(swarm.state, number)}
        assert possible >= {0, 4, 8, 10}
        assert not {1, 2, 3, 5, 6, 7} & possible

    play(scenario, FULL, swarm_spec(FULL, rounds=13, **EVERY_ROUND))
