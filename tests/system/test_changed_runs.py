"""Changes of a run with production nodes on a virtual clock: all change at the same round, bit for bit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from coordinator.run.state.commands import ChangeRun
from coordinator.run.state.events import RoundDecided
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.change import settings_text
from protocol.types import Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.scenario import (
    CORPUS,
    FULL,
    MIXED,
    PIPE,
    Play,
    Scenario,
    contributions,
    resume,
    roll_back,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm

UNLIKE = {"a": Role.REPLICA, **PIPE}
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


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A run of six rounds in which settings are told in round `at`, and hold from round 4 on.

    Each run is played once for all tests, which change nothing in it.
    """

    @cache
    def run(at: int, *settings: str, told: Scenario[object] | None = None) -> VirtualSwarm:
        async def changed(swarm: VirtualSwarm) -> None:
            await swarm.until_round(at)
            if settings:
                assert await change(swarm, *settings, from_round=4) == 4
            if told is not None:
                await told(swarm)

        folder = tmp_path_factory.mktemp("swarm")
        return Play(folder, FaultPlan(folder / "faults")).to_the_end(changed, UNLIKE, rounds=6)

    return run


@pytest.mark.parametrize("settings", [RATES, ("inner.steps=3",), ("inner.weight_decay=0.3",)])
def test_the_anchors_depend_on_the_round_of_a_change_and_not_on_when_it_was_told(
    played: Played, settings: tuple[str, ...]
) -> None:
    early, late, never = played(1, *settings), played(3, *settings), played(1)
    assert digests(early, 6) == digests(late, 6) != digests(never, 6)
    assert digests(early, 3) == digests(never, 3)
    for plan in early.state.plans:  # what is said of a former round is said with its own settings
        assert (early.state.spec_under(plan) == early.spec) == (plan.from_round < 4)
    assert len({stage for stage, _, _ in digests(early, 6)}) == 2
    for swarm in (early, late):
        assert not swarm.diverged()
        assert all(contributions(swarm, name) == [1, 2, 3, 4, 5, 6] for name in UNLIKE)


@pytest.fixture
def annealing(tmp_path: Path) -> tuple[str, ...]:
    """Another mixture, of which one source is that of the run, and a text to measure on."""
    for name in ("maths", "kept"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {n} + {n} = {2 * n}\n" for n in range(3000)))
    mixture = [
        {"name": "web", "source": CORPUS, "weight": 1},
        {"name": "maths", "source": f"text:{tmp_path / 'maths.txt'}", "weight": 2},
    ]
    return settings_text({"data.source": mixture, "data.validation": f"text:{tmp_path / 'kept.txt'}"})


def test_a_run_goes_on_with_other_data(played: Played, annealing: tuple[str, ...]) -> None:
    """All nodes at the same round, whenever it was told; each source goes on where it stood."""
    early, late, never = played(1, *annealing), played(3, *annealing), played(1)
    assert digests(early, 6) == digests(late, 6) != digests(never, 6)
    assert digests(early, 3) == digests(never, 3)
    for swarm in (early, late):
        assert not swarm.diverged()
        data = swarm.state.spec.data
        assert swarm.trainer("p").spec.data == data
        [past] = data.past or ()
        plan = next(each for each in swarm.state.plans if each.from_round == 4)
        assert (past.source, past.samples) == (CORPUS, plan.first_sample)
        assert plan.changes[0].first_sample == plan.first_sample > 0


def test_what_is_told_before_the_run_begins_holds_from_its_round_on(
    play: Play, annealing: tuple[str, ...]
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        assert await change(swarm, *annealing, from_round=3) == 3
        swarm.start("a", "b")
        await swarm.until_over("a", "b")
        swarm.assert_all_agree("a", "b")
        assert next(plan.from_round for plan in swarm.state.plans if plan.changes) == 3
        assert swarm.state.spec.data.past

    play(scenario, FULL, swarm_spec({"a": Role.REPLICA, "b": Role.REPLICA}, rounds=5))


def test_a_node_whose_owner_has_not_named_the_new_data_ends_and_the_others_go_on(
    play: Play, annealing: tuple[str, ...]
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["b"].own_data = (CORPUS,)
        swarm.start("a", "b", "c")
        await swarm.until_round(2)
        await change(swarm, *annealing, from_round=4)
        await swarm.until_over("a", "c")
        swarm.assert_all_agree("a", "c")
        assert [error.code for error in swarm.nodes["b"].errors] == [ErrorCode.DATA_NOT_NAMED]
        assert "--data maths=" in swarm.nodes["b"].errors[0].remedy

    members = {"a": Role.REPLICA, "b": Role.REPLICA, "c": Role.REPLICA}
    play(scenario, members, swarm_spec(members, rounds=8))


@pytest.fixture
def maths_alone(annealing: tuple[str, ...]) -> tuple[str, ...]:
    """A phase without the data with which the run began."""
    source, validation = annealing
    [_, maths] = json.loads(source.partition("=")[2])
    return *settings_text({"data.source": [maths]}), validation


def named(settings: tuple[str, ...]) -> tuple[str, ...]:
    """What --data says of a node that has this data and no other."""
    source, validation = (json.loads(each.partition("=")[2]) for each in settings)
    return *(f"{each['name']}={each['source']}" for each in source), f"validation={validation}"


@pytest.mark.parametrize("joins_at", [5, 8])
@pytest.mark.parametrize("every", [2, 16])
def test_a_node_that_comes_later_needs_the_data_of_now_alone(
    play: Play, maths_alone: tuple[str, ...], joins_at: int, every: int
) -> None:
    """Whether it loads an anchor of these rounds, or applies all rounds from the first one on."""

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["c"].own_data = named(maths_alone)
        swarm.start("a", "b")
        await swarm.until_round(2)
        await change(swarm, *maths_alone, from_round=4)
        await swarm.until_round(joins_at)
        swarm.start("c")
        await swarm.until_over("a", "b", "c")
        swarm.assert_all_agree("a", "b", "c")
        assert not swarm.diverged()
        assert not swarm.nodes["c"].errors
        assert contributions(swarm, "c")[-1] == 14

    kept_rounds = {"recovery.checkpoint_every": every, "recovery.keep_rounds": 2 * every + 4}
    play(scenario, FULL, swarm_spec({"a": Role.REPLICA, "b": Role.REPLICA}, rounds=14, **kept_rounds))


def test_a_rollback_into_a_former_phase_needs_its_data_and_says_so(
    play: Play, maths_alone: tuple[str, ...]
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "b")
        await swarm.until_round(2)
        await change(swarm, *maths_alone, from_round=5)
        await swarm.until_round(6)
        swarm.nodes["c"].own_data = named(maths_alone)
        swarm.start("c")
        await swarm.until_round(9)
        await roll_back(swarm, 4)
        await resume(swarm)
        await swarm.until_over("a", "b")
        swarm.assert_all_agree("a", "b")
        assert contributions(swarm, "c")
        [error] = swarm.nodes["c"].errors
        assert error.code is ErrorCode.DATA_NOT_NAMED
        assert f"start the node with --data {CORPUS}" in error.remedy

    spec = swarm_spec({"a": Role.REPLICA, "b": Role.REPLICA}, rounds=14, **{"recovery.checkpoint_every": 1})
    play(scenario, FULL, spec)


def test_a_node_that_was_away_reads_the_same_samples_and_a_rollback_brings_the_data_back(
    play: Play, annealing: tuple[str, ...]
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "b")
        await swarm.until_round(3)
        swarm.kill("b")
        await change(swarm, *annealing, from_round=5)
        await swarm.until_round(6)
        swarm.start("b")
        await swarm.until_round(9)
        await roll_back(swarm, 4)
        await resume(swarm)
        await swarm.until_over("a", "b")
        swarm.assert_all_agree("a", "b")
        assert not swarm.diverged()
        data = swarm.state.spec.data
        assert (data.source, data.validation) == (CORPUS, "")
        assert [isinstance(each.source, str) for each in data.past or ()] == [True, False]
        assert swarm.trainer("b").spec.data == data

    spec = swarm_spec({"a": Role.REPLICA, "b": Role.REPLICA}, rounds=14, **{"recovery.checkpoint_every": 1})
    play(scenario, FULL, spec)


def test_nothing_that_was_learned_is_lost_with_a_change(played: Played) -> None:
    """Moments and error feedback stay: with other deadlines alone, all anchors are the same."""
    assert digests(played(1, "timing.link=61.0"), 6) == digests(played(1), 6)


def test_more_and_fewer_rounds(played: Played) -> None:
    async def fewer(swarm: VirtualSwarm) -> None:
        await change(swarm, "rounds=7", from_round=5)

    assert played(1, "rounds=8", told=fewer).state.rounds_decided == 7


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


def test_a_rollback_to_a_rollback_has_the_settings_of_the_round_that_this_one_restored(play: Play) -> None:
    async def twice(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        await change(swarm, *RATES, from_round=4)
        await swarm.until_round(6)
        first = await roll_back(swarm, 2)
        await resume(swarm)
        await swarm.until_round(first + 3)
        await roll_back(swarm, first)
        await resume(swarm)

    swarm = play.to_the_end(twice, rounds=12, **{"recovery.checkpoint_every": 1})
    assert swarm.state.spec.inner == swarm.spec.inner


def test_a_rollback_leaves_what_the_operator_has_told_for_the_next_round(play: Play) -> None:
    async def rolled_back(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        await change(swarm, *RATES, from_round=4)
        await swarm.until_round(6)
        await swarm.until_kept(2)
        await change(swarm, "outer.learning_rate=0.7", from_round=7)
        assert await roll_back(swarm, 2) == 6
        await resume(swarm)

    swarm = play.to_the_end(rolled_back, rounds=8, **{"recovery.checkpoint_every": 1})
    assert swarm.state.spec.outer.learning_rate == 0.7
    assert swarm.state.spec.inner == swarm.spec.inner


def test_a_rollback_that_a_change_to_come_does_not_fit_is_refused_and_changes_nothing(play: Play) -> None:
    async def refused(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        await change(swarm, "link.least_k=2", "link.most_k=4", from_round=4)
        await swarm.until_round(5)
        await change(swarm, "link.most_k=6", from_round=7)
        await swarm.until_round(6)
        with pytest.raises(HetnodeError, match=r"least_k 8 exceeds link\.most_k 6") as raised:
            await roll_back(swarm, 2)
        assert raised.value.code is ErrorCode.BAD_OPTION
        assert swarm.state.pause is None

    ks = {"link.k": 0, "link.uncompressed": True, "link.least_k": 8, "link.most_k": 16}
    swarm = play.to_the_end(refused, MIXED, rounds=8, **ks, **{"recovery.checkpoint_every": 1})
    assert [each.from_round for each in swarm.state.changes] == [4, 7]


def test_a_node_that_comes_after_the_last_round_of_which_the_run_was_begun_takes_part(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "b")
        await swarm.until_round(2)
        await change(swarm, "rounds=12")
        await swarm.until_round(8)
        swarm.start("c")
        await swarm.until_over("a", "b", "c")
        swarm.assert_all_agree("a", "b", "c")
        assert contributions(swarm, "c")[-1] == 12

    play(scenario, FULL, swarm_spec({"a": Role.REPLICA, "b": Role.REPLICA}, rounds=4))


def test_tokens_and_times_are_those_of_the_steps_that_held(play: Play) -> None:
    """Also of the round before a change, whose first decision makes the plan with it."""

    async def shorter(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        await change(swarm, "inner.steps=2", from_round=5)

    swarm = play.to_the_end(shorter, rounds=6, **{"inner.steps": 20})
    kept = swarm.state.tokens_at
    assert swarm.state.tokens == kept[4] * (4 * 20 + 2 * 2) / (4 * 20)
    ends = [event.at for event in swarm.happened(RoundDecided) if event.decision.stage == 1]
    # A payload that is offered after a tenth of the usual time is no liar's.
    assert 4 * (ends[4] - ends[3]) < ends[3] - ends[2]


def test_a_node_with_a_full_disk_waits_at_a_change_and_goes_on(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", None, 3, Moment.CHECKPOINT, Action.FULL, times=2)

    async def changed(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        await change(swarm, *RATES, from_round=4)

    swarm = play.to_the_end(changed, rounds=10)
    assert contributions(swarm, "b") == [1, 2, 3, *range(contributions(swarm, "b")[3], 11)]


def test_what_cannot_change_is_refused_and_changes_nothing(play: Play) -> None:
    cases: list[tuple[tuple[str, ...], int, ErrorCode]] = [
        (("model.width=64",), 0, ErrorCode.BAD_SPEC),
        (("inner.learning_rate=-1",), 0, ErrorCode.BAD_SPEC),
        (("inner.learning_rate=",), 0, ErrorCode.BAD_SPEC),
        (("inner.steps=100000000",), 0, ErrorCode.BAD_SPEC),
        (("rounds=2",), 0, ErrorCode.BAD_OPTION),
        (RATES, 3, ErrorCode.BAD_OPTION),
        (RATES, 9, ErrorCode.BAD_OPTION),
        (("rounds=6",), 0, ErrorCode.BAD_OPTION),
    ]

    async def refused(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        for settings, from_round, code in cases:
            with pytest.raises(HetnodeError) as raised:
                await change(swarm, *settings, from_round=from_round)
            assert raised.value.code is code, settings

    assert not play.to_the_end(refused, rounds=6).state.changes
