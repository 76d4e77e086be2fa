"""What scenarios with a rollback do and wait for."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.run.state.commands import ResumeRun, RollBack
from coordinator.run.state.state import State
from tests.virtual.swarm import VirtualSwarm


async def roll_back(swarm: VirtualSwarm, restore_round: int) -> int:
    """Roll back as soon as peers have told what they keep. Returns the round of the rollback."""
    await swarm.until_kept(restore_round)
    await swarm.coordinator.command_loop.execute(RollBack(restore_round, "a test"))
    return max(swarm.state.restored)


async def resume(swarm: VirtualSwarm) -> None:
    await swarm.coordinator.command_loop.execute(ResumeRun())


async def roll_back_and_end(swarm: VirtualSwarm, at: int, restore_round: int) -> None:
    """Start a run, roll back in round `at`, go on, and wait until the run is over. All must agree."""
    swarm.start()
    await swarm.until_round(at)
    number = await roll_back(swarm, restore_round)
    await swarm.until(attested(number, 3), "the rollback")
    await resume(swarm)
    await swarm.until_over()
    swarm.assert_all_agree()


def attested(number: int, count: int) -> Callable[[State], bool]:
    """Whether `count` peers have attested each stage after that round."""

    def done(state: State) -> bool:
        return all(len(state.digests.get((stage, number, "stage"), {})) >= count for stage in range(2))

    return done
