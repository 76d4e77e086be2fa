"""Homes die, stand still and lose lines at random moments: no round is lost, and no sample counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.run.state.events import PlanAdopted
from protocol.types import Role
from tests.support.examples import examples
from tests.support.faults import FaultPlan
from tests.virtual.scenario import QUICK, Play, assert_each_sample_counts_once, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

STEPS, SECONDS, ROUNDS = 5, 10.0, 5
HOMES, SPARES = "pquv", "st"
MEMBERS = {"a": Role.REPLICA, **dict.fromkeys(HOMES, Role.STAGE)}
TROUBLES = st.lists(
    st.tuples(
        st.floats(0.5, 45.0),
        st.sampled_from(HOMES + SPARES),
        st.sampled_from(["kill", "kill", "suspend", "reset", "isolate"]),
        st.floats(1.0, 40.0),
    ),
    min_size=1,
    max_size=8,
)
"""Each: the seconds since the one before, who is struck, how, and for how many seconds, less than a round."""


async def trouble(swarm: VirtualSwarm, name: str, kind: str, seconds: float) -> None:
    if not swarm.nodes[name].is_running:
        return
    if kind == "kill":
        swarm.kill(name)
        swarm.start_later(name, seconds)
    elif kind == "suspend":
        swarm.suspend(name, seconds)
    elif kind == "reset":
        for other in HOMES + SPARES:
            swarm.network.reset(name, other)
    else:
        swarm.network.isolate(name)
        await asyncio.sleep(min(seconds, 8.0))
        swarm.network.heal()


@pytest.mark.virtual
@settings(max_examples=examples(gate=3, search=100))
@given(troubles=TROUBLES, overlap=st.sampled_from([0, 1]))
def test_homes_that_die_at_random_moments_lose_no_round_and_count_no_sample_twice(
    tmp_path_factory: pytest.TempPathFactory,
    troubles: Sequence[tuple[float, str, str, float]],
    overlap: int,
) -> None:
    folder: Path = tmp_path_factory.mktemp("deaths")
    shape = {"swarm.pipelines": 2, "grouping.spares": 2, "inner.steps": STEPS, "outer.overlap": overlap}
    spec = swarm_spec(MEMBERS, ROUNDS, **{**shape, "recovery.checkpoint_every": 1, **QUICK})

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.is_supervised = True
        swarm.start(*MEMBERS)
        await swarm.until_round(1)
        swarm.start(*SPARES)
        for wait, *struck in troubles:
            await asyncio.sleep(wait)
            if swarm.state.current_round >= ROUNDS:
                break  # who returned after the end would be refused
            await trouble(swarm, *struck)
        await swarm.until_all_over()
        swarm.assert_all_agree("a")
        assert swarm.committed(0) == swarm.committed(1) == contributions(swarm, "a") == swarm.rounds
        assert_each_sample_counts_once(swarm)

    Play(folder, FaultPlan(folder / "faults"))(
        scenario, {**MEMBERS, **dict.fromkeys(SPARES, Role.STAGE)}, spec, step_seconds=SECONDS
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # on a busy machine it takes more than the usual 600 s
def test_pipelines_that_fail_every_two_hours_train_nine_tenths_of_what_they_could(play: Play) -> None:
    """16 pipelines of two homes, rounds of 20 minutes; who dies is back after two minutes, as a spare."""
    pipelines, rounds, steps, mean_seconds, random = 16, 12, 10, 7200.0, Random(1)
    homes = [f"h{number}" for number in range(2 * pipelines)]
    members = {"a": Role.REPLICA, **dict.fromkeys(homes, Role.STAGE)}
    shape = {"swarm.pipelines": pipelines, "grouping.spares": 2, "inner.steps": steps}
    spec = swarm_spec(members, rounds, **shape)

    async def scenario(swarm: VirtualSwarm) -> float:
        swarm.is_supervised = True
        swarm.start(*members)
        await swarm.until_round(1)
        swarm.start(*SPARES)
        began = asyncio.get_running_loop().time()
        while swarm.state.current_round < rounds:
            await asyncio.sleep(random.expovariate(pipelines / mean_seconds))
            seats = {member.peer for each in swarm.state.plans[-1].replicas[1:] for member in each.members}
            alive = [
                name for name, node in swarm.nodes.items() if node.is_running and swarm.peer(name) in seats
            ]
            if swarm.state.current_round < rounds:  # who returned after the end would be refused
                swarm.kill(struck := random.choice(alive))
                swarm.start_later(struck, 120.0)
        await swarm.until_all_over()
        assert_each_sample_counts_once(swarm)
        assert sum(bool(event.plan.repairs) for event in swarm.happened(PlanAdopted)) > 10
        measured = sum(line["steps"] for (name, _), line in swarm.measured().items() if name != "a")
        ideal = 2 * pipelines * (asyncio.get_running_loop().time() - began) / 120.0
        return measured / ideal

    later = dict.fromkeys(SPARES, Role.STAGE)
    assert play(scenario, {**members, **later}, spec, step_seconds=120.0) > 0.9
