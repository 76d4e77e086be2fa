"""A member dies, hangs or is cut off in an inner step: that step does not count, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from coordinator.run.state.events import PeerRetreated
from node.core.optimizer.inner import Moments
from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.network import SILENCE_SECONDS
from tests.virtual.scenario import MIXED, PIPE, SPARSE, Play, contributions, shares, swarm_spec
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.worker import VirtualWorker

ROUND, STEP = 2, 1
"""The faults strike in this round after its first step."""
OF_A_STEP = [
    Moment.PHASE,
    Moment.WARM_UP,
    Moment.FORWARD,
    Moment.BACKWARD,
    Moment.COOL_DOWN,
    Moment.NORM,
    Moment.APPLY,
]
CHAIN = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}
TRIO = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE, "r": Role.STAGE}


def microbatch_spec(members: Mapping[str, Role], rounds: int = 7, **overrides: object) -> RunSpec:
    """With four microbatches, 1F1B has a warm-up, a steady part and a cool-down at each position."""
    stages = sum(role is Role.STAGE for role in members.values())
    shape = {"swarm.stages": 3, "swarm.pipelines": 1, "model.layers": 3} if stages == 3 else {}
    fixed = {"inner.microbatches": 4, "recovery.checkpoint_every": 1, **shape}
    return swarm_spec(members, rounds, **{**fixed, **overrides})


def unfinished_work(swarm: VirtualSwarm, name: str) -> bool:
    """Whether activations or gradients of a step are left in the node's worker."""
    trainer = swarm.trainer(name)
    parameters = (each for stage in trainer.stages for each in trainer.parameters(stage).values())
    return not trainer.hosted.is_idle or any(each.grad is not None for each in parameters)


def places_and_moments() -> list[object]:
    """Every moment at both ends of a chain, and one in the middle of a longer one.

    Two of those of the upper end and one of the lower are not among the slow tests.
    """
    moments = [*OF_A_STEP, Moment.VALIDATE]
    quick = {"p": (Moment.FORWARD, Moment.NORM), "q": (Moment.BACKWARD,)}
    ends = [
        pytest.param(
            *(CHAIN, name, each),
            id=f"{each}-of-{name}",
            marks=[] if each in usual else [pytest.mark.slow],
        )
        for name, usual in quick.items()
        for each in moments
    ]
    return [*ends, pytest.param(TRIO, "q", Moment.BACKWARD, id="in-the-middle")]


@pytest.mark.parametrize(("members", "name", "moment"), places_and_moments())
def test_a_member_that_is_killed_in_a_step_costs_only_that_step(
    play: Play, plan: FaultPlan, members: Mapping[str, Role], name: str, moment: Moment
) -> None:
    in_a_step = moment is not Moment.VALIDATE
    plan.fail_at(name, None, ROUND, moment, Action.KILL, step=STEP if in_a_step else None)
    survivors = [other for other, role in members.items() if role is Role.STAGE and other != name]
    full = [other for other, role in members.items() if role is Role.REPLICA]

    async def killed(swarm: VirtualSwarm) -> None:
        await swarm.until_fired(name)
        for survivor in survivors:
            what = f"the retreat of {survivor}"
            await swarm.until(lambda _, name=survivor: name in retreated(swarm), what, seconds=30)
            assert not unfinished_work(swarm, survivor)
        swarm.start(name)

    swarm = play.to_the_end(killed, members, spec=microbatch_spec(members))
    assert all(contributions(swarm, replica) == swarm.rounds for replica in full)
    assert all(contributions(swarm, member)[-1] == swarm.spec.rounds for member in (name, *survivors))
    assert (ROUND in contributions(swarm, name)) is not in_a_step
    # The first step, and with the last call of the second one that one, which all others have finished.
    done = (STEP + (moment is Moment.APPLY)) / swarm.spec.inner.steps if in_a_step else 1.0
    assert {share for each in survivors for share in shares(swarm, each, ROUND).values()} == {done}


def retreated(swarm: VirtualSwarm) -> dict[str, float]:
    """When each node retreated, by name."""
    names = {swarm.peer(name): name for name in swarm.nodes}
    return {names[event.peer]: event.at for event in swarm.happened(PeerRetreated)}


@pytest.mark.parametrize("moment", [pytest.param(Moment.FORWARD, marks=pytest.mark.slow), Moment.NORM])
def test_a_spare_takes_the_stage_of_a_member_that_died_in_a_step(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("q", None, ROUND, moment, Action.KILL, step=STEP)
    # The loss is known while the next round runs; the one after it has the spare.
    quick = {"timing.heartbeat": 0.5, "timing.lost_after": 1.5, "grouping.spares": 2}
    spares = dict.fromkeys(("spare-0", "spare-1"), Role.STAGE)
    lost = []

    async def replaced(swarm: VirtualSwarm) -> None:
        await swarm.until_round(1)
        swarm.start(*spares)
        await swarm.until_fired("q")
        lost.append(swarm.state.reservations[swarm.peer("q")].stages)

    spec = microbatch_spec(CHAIN, 6, **quick)
    swarm = play.to_the_end(replaced, CHAIN, later=spares, ending=("a", "p", *spares), spec=spec)
    assert contributions(swarm, "a") == swarm.rounds
    (stand_in,) = (name for name in spares if contributions(swarm, name))
    assert [swarm.state.reservations[swarm.peer(stand_in)].stages] == lost
    assert contributions(swarm, "p")[-1] == contributions(swarm, stand_in)[-1] == 6
    # The spare had followed all rounds, so it was ready at once.
    assert contributions(swarm, stand_in)[0] <= ROUND + 2


LINK_SECONDS = 8.0


@pytest.mark.parametrize(
    ("how", "moment"),
    [
        ("stopped", Moment.FORWARD),
        pytest.param("cut off", Moment.BACKWARD, marks=pytest.mark.slow),
        ("cut off", Moment.NORM),
        pytest.param("stopped", Moment.BACKWARD, marks=pytest.mark.slow),
        pytest.param("stopped", Moment.NORM, marks=pytest.mark.slow),
        pytest.param("cut off", Moment.FORWARD, marks=pytest.mark.slow),
    ],
)
def test_a_silent_neighbour_is_found_within_the_bound(
    play: Play, plan: FaultPlan, how: str, moment: Moment
) -> None:
    # A member that is cut off holds its frame back until the cut, so that p never gets it.
    seconds = 14.0 if how == "stopped" else 2.0
    action = Action.STOP if how == "stopped" else Action.DELAY
    plan.fail_at("q", None, ROUND, moment, action, step=STEP, seconds=seconds)
    bounds = {**SPARSE, "timing.link": LINK_SECONDS, "timing.lost_after": 60.0}

    async def silent(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("q")
        if how == "cut off":
            swarm.network.separate("p", "q")
        await swarm.until(lambda _: "p" in retreated(swarm), "the retreat of p", seconds=30)
        (fired,) = swarm.plan.fired("q")
        waited = retreated(swarm)["p"] - fired.time
        # Frames on the way may still arrive. After them the link waits as long as one frame may take.
        assert waited <= LINK_SECONDS + 1.0 < SILENCE_SECONDS
        assert not unfinished_work(swarm, "p")
        swarm.network.heal()

    swarm = play.to_the_end(silent, MIXED, spec=microbatch_spec(MIXED, 8, **bounds))
    assert contributions(swarm, "a") == swarm.rounds
    assert contributions(swarm, "p")[-1] == 8


def test_a_member_that_returns_within_a_round_keeps_its_stage_and_its_optimizer_moments(
    play: Play, plan: FaultPlan
) -> None:
    plan.fail_at("q", None, ROUND, Moment.FORWARD, Action.KILL, step=STEP)

    async def returned(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("q")
        place = swarm.state.reservations[swarm.peer("q")]
        stage, former = place.stages.first, swarm.nodes["q"].worker
        before = moments_of_stage(swarm, "q", stage)
        swarm.start("q")
        await swarm.until(lambda _: is_ready(swarm, "q", former), "q has loaded its checkpoint")
        after = moments_of_stage(swarm, "q", stage)
        # They are those of the last complete round: the steps of this round are lost with the process.
        assert after["steps"] == (ROUND - 1) * swarm.spec.inner.steps == before["steps"] - STEP
        assert after["cold_steps"] is None
        assert any(torch.count_nonzero(value) for value in after["exp_avg"].values())
        await swarm.until(lambda _: max(contributions(swarm, "q")) > ROUND, "a payload after its return")
        assert swarm.state.reservations[swarm.peer("q")] == place
        assert moments_of_stage(swarm, "q", stage)["cold_steps"] is None

    play.to_the_end(returned, PIPE, spec=microbatch_spec(PIPE, 6))


def is_ready(swarm: VirtualSwarm, name: str, former: VirtualWorker | None) -> bool:
    """Whether the restarted node has loaded anchors. `former` is its worker before the restart."""
    worker = swarm.nodes[name].worker
    trainer = getattr(worker and worker.worker, "trainer", None)
    return worker is not former and trainer is not None and min(trainer.outer.rounds.values()) > 0


def moments_of_stage(swarm: VirtualSwarm, name: str, stage: int) -> Moments:
    found = swarm.trainer(name).inner.state_dict()[stage]
    assert found is not None
    return found
