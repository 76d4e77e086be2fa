"""A standby takes the run over: nothing that anyone has learned is lost, and the former coordinator ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from coordinator.run.state.events import CoordinatorStarted, RoundDecided
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Role
from tests.virtual.coordinator import NAME
from tests.virtual.scenario import FULL, MIXED, SPARSE, Play, swarm_spec
from tests.virtual.swarm import VirtualSwarm

MACHINES = ("standby", NAME)
"""Two machines, one of which coordinates; the other one, once it is repaired, is the standby."""


async def in_step(swarm: VirtualSwarm, seconds: float = 60.0) -> None:
    """Wait until the coordinator's answers wait for its standby."""
    async with asyncio.timeout(seconds):
        while not swarm.coordinator.desk.is_in_step:  # noqa: ASYNC110  a log line tells people
            await asyncio.sleep(0.05)
    await asyncio.sleep(1)  # nodes are told of it


@pytest.mark.parametrize(
    ("members", "kills"), [(FULL, 4), (MIXED, 3), pytest.param(MIXED, 20, marks=pytest.mark.slow)]
)
def test_the_coordinator_is_killed_again_and_again_at_random_moments(
    play: Play, members: dict[str, Role], kills: int
) -> None:
    chance = random.Random(kills)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*members)
        await swarm.until_round(2)
        for number in range(kills):
            standby = swarm.standby(MACHINES[number % 2])
            await in_step(swarm)
            await asyncio.sleep(chance.uniform(0, 40))
            before = swarm.state.current_round
            swarm.coordinator.kill()
            await asyncio.sleep(chance.uniform(0, 60))
            await swarm.take_over(standby)
            assert swarm.state.current_round in (before, before + 1)  # what nobody has learned may be decided
        await swarm.until_over()
        swarm.assert_all_agree()
        terms = [each.term for each in swarm.happened(CoordinatorStarted)]
        assert terms == sorted(set(terms))
        assert len(terms) == kills + 1

    play(scenario, members, swarm_spec(members, 5 * kills + 4, **SPARSE))


@pytest.mark.parametrize("knows", [True, False])
def test_a_former_coordinator_that_was_not_dead_ends(play: Play, knows: bool) -> None:
    """It looks at the other one, and if it cannot reach it, a node tells it."""

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(2)
        standby, former = swarm.standby("standby"), swarm.coordinator
        await in_step(swarm)
        assert former.process is not None
        swarm.loop.suspend(former.process)
        swarm.network.start_keepalive(former.process)
        await asyncio.sleep(60)
        await swarm.take_over(standby)
        await swarm.until_round(4)
        if not knows:
            swarm.network.separate(NAME, "standby")
        swarm.loop.resume(former.process)
        if not knows:
            swarm.network.isolate("standby")  # nodes look where the coordinator was before
        with pytest.raises(HetnodeError) as ended:
            await former.ended()
        assert ended.value.code is ErrorCode.COORDINATOR_REPLACED
        swarm.network.heal()
        former.kill()
        with pytest.raises(HetnodeError) as refused:
            await former.start()
        assert refused.value.code is ErrorCode.COORDINATOR_REPLACED
        await swarm.until_over()
        swarm.assert_all_agree()
        theirs = [each for each in former.store.events() if isinstance(each, RoundDecided)]
        assert theirs == swarm.happened(RoundDecided)[: len(theirs)]

    play(scenario, spec=swarm_spec(FULL, 8, **SPARSE))
