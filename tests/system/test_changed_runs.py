"""Changes of a run with production nodes on a virtual clock: all change at the same round, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from coordinator.run.state.commands import ChangeRun
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Role
from tests.support.faults import FaultPlan
from tests.virtual.scenario import (
    FULL,
    MIXED,
    Play,
    Scenario,
    contributions,
    resume,
    roll_back,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm

RATES = ("inner.learning_rate=0.0005", "outer.learning_rate=0.5")


async def change(swarm: VirtualSwarm, *settings: str, from_round: int = 0) -> int:
    """The first round of the change."""
    loop = swarm.coordinator.command_loop
    await loop.execute(ChangeRun(settings, from_round, "the loss stands still"))
    return max(each.from_round for each in loop.state.changes)


def digests(swarm: VirtualSwarm, number: int) -> set[tuple[int, str, str]]:
    return {
        (stage, part, digest)
        for (stage, its_round, part), found in swarm.state.digests.items()
        for digest in found.values()
        if its_round == number
    }


Played = Callable[..., VirtualSwarm]


@pytest.fixture
def played(tmp_path: Path, plan: FaultPlan) -> Played:
    """A run of six rounds in which settings are told in round `at`, and hold from round 4 on."""

    def run(at: int, *settings: str, told: Scenario[object] | None = None) -> VirtualSwarm:
        async def changed(swarm: VirtualSwarm) -> None:
            await swarm.until_round(at)
            if settings:
                assert await change(swarm, *settings, from_round=4) == 4
            if told is not None:
                await told(swarm)

        return Play(tmp_path / f"swarm-{next(numbers)}", plan).to_the_end(changed, MIXED, rounds=6)

    numbers = count()
    return run


@pytest.mark.parametrize("settings", [RATES, ("inner.steps=3",), ("inner.weight_decay=0.3",)])
def test_the_anchors_depend_on_the_round_of_a_change_and_not_on_when_it_was_told(
    played: Played, settings: tuple[str, ...]
) -> None:
    early, late, never = played(1, *settings), played(3, *settings), played(1)
    assert digests(early, 6) == digests(late, 6) != digests(never, 6)
    assert digests(early, 3) == digests(never, 3)
    assert len({stage for stage, _, _ in digests(early, 6)}) == 2
    for swarm in (early, late):
        assert not swarm.diverged()
        assert all(contributions(swarm, name) == [1, 2, 3, 4, 5, 6] for name in MIXED)


def test_nothing_that_was_learned_is_lost_with_a_change(played: Played) -> None:
    """Moments and error feedback stay: with other deadlines alone, all anchors are the same."""
    assert digests(played(1, "timing.link=61.0"), 6) == digests(played(1), 6)


def test_more_and_fewer_rounds(played: Played) -> None:
    assert played(1, "rounds=8").state.rounds_decided == 8
    assert played(1, "rounds=5").state.rounds_decided == 5


def test_nodes_that_are_away_or_come_later_take_all_changes_in_their_order(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "b")
        await swarm.until_round(3)
        swarm.kill("b")
        first = await change(swarm, "outer.learning_rate=0.5")
        await swarm.until_round(first + 2)
        second = await change(swarm, "inner.steps=3", "outer.learning_rate=0.7")
        await swarm.until_round(second + 2)
        swarm.start("b", "c")
        await swarm.until_over("a", "b", "c")
        swarm.assert_all_agree("a", "b", "c")
        assert contributions(swarm, "b")[-1] == contributions(swarm, "c")[-1] == 14
        assert not swarm.diverged()
        assert swarm.state.spec.inner.steps == swarm.trainer("c").spec.inner.steps == 3

    play(scenario, FULL, swarm_spec({"a": Role.REPLICA, "b": Role.REPLICA}, rounds=14))


def test_a_restart_of_the_coordinator_keeps_a_change_that_is_to_come(played: Played) -> None:
    async def restarted(swarm: VirtualSwarm) -> None:
        swarm.coordinator.kill()
        await asyncio.sleep(5)
        await swarm.coordinator.start()

    swarm = played(1, *RATES, told=restarted)
    assert not swarm.diverged()
    assert [each.from_round for each in swarm.state.plans[-1].changes] == [4]
    assert swarm.state.spec.outer.learning_rate == swarm.trainer("p").spec.outer.learning_rate == 0.5


def test_a_rollback_undoes_the_changes_after_its_round_but_for_the_rounds(play: Play) -> None:
    async def rolled_back(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        await change(swarm, *RATES, "rounds=9", from_round=4)
        await swarm.until_round(6)
        await swarm.until_kept(2)
        assert await roll_back(swarm, 2) == 6
        await resume(swarm)

    swarm = play.to_the_end(rolled_back, rounds=8, **{"recovery.checkpoint_every": 1})
    undone = swarm.state.changes[-1]
    assert (undone.from_round, undone.reason) == (7, "the rollback to round 2")
    assert swarm.state.spec.outer == swarm.spec.outer
    assert swarm.state.spec.inner == swarm.spec.inner
    assert swarm.state.rounds_decided == 9


@pytest.mark.parametrize(
    ("settings", "from_round", "code"),
    [
        (("model.width=64",), 0, ErrorCode.BAD_SPEC),
        (("inner.learning_rate=-1",), 0, ErrorCode.BAD_SPEC),
        (("inner.learning_rate=",), 0, ErrorCode.BAD_SPEC),
        (("inner.steps=100000000",), 0, ErrorCode.BAD_SPEC),
        (("rounds=2",), 0, ErrorCode.BAD_OPTION),
        (RATES, 3, ErrorCode.BAD_OPTION),
        (RATES, 9, ErrorCode.BAD_OPTION),
        (("rounds=6",), 0, ErrorCode.BAD_OPTION),
    ],
)
def test_what_cannot_change_is_refused_and_changes_nothing(
    play: Play, settings: tuple[str, ...], from_round: int, code: ErrorCode
) -> None:
    async def refused(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        with pytest.raises(HetnodeError) as raised:
            await change(swarm, *settings, from_round=from_round)
        assert raised.value.code is code

    assert not play.to_the_end(refused, rounds=6).state.changes
