"""A coordinator that was restored from an older copy of its folder: nodes wait for the newest one."""

from __future__ import annotations

import asyncio
import copy

import pytest

from coordinator.rollback import problem_of
from coordinator.run.state.commands import ChangeRun, RollBack
from coordinator.status.causes import peer_cause
from protocol.status import CauseCode
from protocol.types import Role
from tests.virtual.scenario import FULL, MIXED, SPARSE, Play, attested, swarm_spec
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


async def restored_from_a_copy(swarm: VirtualSwarm, copied: int, killed: int) -> None:
    """The coordinator dies after round `killed`, and starts with the log as it was in round `copied`."""
    await swarm.until_round(copied)
    older = copy.deepcopy(swarm.coordinator.store)
    await swarm.until(attested(killed, 3), "the anchors")
    swarm.coordinator.kill()
    swarm.coordinator.store = older
    await swarm.coordinator.start()


async def adopt(swarm: VirtualSwarm) -> int:
    """Let the run go on from the newest round that most nodes hold. Returns that round."""
    async with asyncio.timeout(200):
        # Heartbeats are no events that could be waited for.
        while not (found := [each for each in _ahead(swarm) if not problem_of(swarm.state, each)]):  # noqa: ASYNC110
            await asyncio.sleep(1)
    await swarm.coordinator.command_loop.execute(RollBack(max(found), ""))
    return max(found)


def _ahead(swarm: VirtualSwarm) -> set[int]:
    told = (seen.ahead for seen in swarm.state.last_seen.values())
    return {each for ahead in told for _, each, _ in ahead if each >= swarm.state.current_round}


@pytest.mark.parametrize(
    ("members", "settings"),
    [
        pytest.param(FULL, {}, marks=pytest.mark.slow),
        (MIXED, {"outer.overlap": 1}),
        pytest.param(MIXED, {"link.embedding_every": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_run_goes_on_from_the_newest_round_that_nodes_hold(
    play: Play, caplog: pytest.LogCaptureFixture, members: dict[str, Role], settings: dict[str, int]
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*members)
        await restored_from_a_copy(swarm, 3, 6)
        assert await adopt(swarm) == 6
        assert swarm.state.restored == {7: 6}
        await swarm.until_round(9)
        swarm.start("late")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert not swarm.diverged()

    spec = swarm_spec(members, rounds=12, **SPARSE, **settings)
    play(scenario, {**members, "late": Role.REPLICA}, spec)
    assert "goes back to round" not in caplog.text
    assert "parameters before" not in caplog.text


@pytest.mark.parametrize("seed", [0, 4])
def test_members_that_stopped_one_round_apart_go_on_from_the_earlier_round(play: Play, seed: int) -> None:
    """One of two replicas has heard the last decision, and a third one was away all the time.

    On another network the other replica has heard it of one stage: no round of both stages is left, but that
    on the disks.
    """

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*FULL)
        await swarm.until_round(3)
        older = copy.deepcopy(swarm.coordinator.store)
        swarm.kill("c")
        await swarm.until_round(7)
        swarm.network.isolate("b")
        await swarm.until(attested(6, 1), "the anchor of one")
        swarm.coordinator.kill()
        swarm.network.heal()
        swarm.coordinator.store = older
        await swarm.coordinator.start()
        adopted = await adopt(swarm)
        newest = {number for _, number, _ in swarm.state.last_seen[swarm.peer("b")].ahead}
        assert adopted == (4 if 6 in newest else 5)
        assert swarm.state.restored == {7: adopted}
        swarm.start("c")
        await swarm.until_round(9)
        swarm.coordinator.kill()
        await swarm.coordinator.start()
        await swarm.until_over()
        swarm.assert_all_agree()

    play(scenario, FULL, swarm_spec(FULL, rounds=12), seed=seed)


def test_a_copy_that_knows_of_fewer_rounds_goes_on_when_it_is_told_the_number_again(play: Play) -> None:
    more = ChangeRun(("rounds=14",), 0, "")

    async def longer(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(2)
        older = copy.deepcopy(swarm.coordinator.store)
        await swarm.coordinator.command_loop.execute(more)
        await swarm.until(attested(7, 3), "the anchors")
        swarm.coordinator.kill()
        swarm.coordinator.store = older
        await swarm.coordinator.start()
        await asyncio.sleep(60)
        swarm.kill("b")
        swarm.start("b")
        await asyncio.sleep(60)
        assert all(node.is_running and not node.errors for node in swarm.nodes.values())
        await swarm.coordinator.command_loop.execute(more)
        await asyncio.sleep(60)
        assert await adopt(swarm) > 4
        await swarm.until_over()
        assert swarm.state.rounds_decided == 14

    play(longer, spec=swarm_spec(FULL, rounds=4))
