"""A standby takes the run over: nothing that anyone has learned is lost, and the former coordinator ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from coordinator.run.state.commands import ChangeRun, Command, CreateInvite, PauseRun, ResumeRun, RollBack
from coordinator.run.state.events import CoordinatorStarted, RoundDecided
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PausedBy, Role
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


def test_what_the_operator_was_told_outlives_a_coordinator_that_dies_at_once(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        async def order(command: Command, number: int) -> None:
            standby = swarm.standby(MACHINES[number % 2])
            await in_step(swarm)
            await swarm.coordinator.command_loop.execute(command)
            swarm.coordinator.kill()
            await swarm.take_over(standby)

        swarm.start()
        await swarm.until_round(3)
        await order(ChangeRun(("inner.learning_rate=0.001",), 0, "a test"), 0)
        assert [each.settings for each in swarm.state.changes] == [("inner.learning_rate=0.001",)]
        await order(CreateInvite("invite", "a" * 64, 1, 3600.0, None), 1)
        assert "invite" in swarm.state.invitations
        await order(PauseRun(PausedBy.OPERATOR, "a test"), 2)
        assert swarm.state.pause is not None
        await order(ResumeRun(), 3)
        assert swarm.state.pause is None
        await swarm.until_round(swarm.state.current_round + 2)
        await swarm.until_kept(4)
        await order(RollBack(4, "a test"), 4)
        assert 4 in swarm.state.restored.values()
        await order(ResumeRun(), 5)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert not swarm.diverged()

    play(scenario, spec=swarm_spec(FULL, 20, **SPARSE, **{"recovery.checkpoint_every": 1}))


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
