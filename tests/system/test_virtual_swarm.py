"""Swarms of production nodes on a virtual clock: after faults of any kind all anchors agree."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.run.state.events import PeerLost, PlanAdopted
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.sampling import sample_range
from protocol.spec.fixed import EXTRA_STEPS
from protocol.types import Committed, Role
from tests.builders import decisions_in
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual import swarm as virtual
from tests.virtual.scenario import (
    FULL,
    MIXED,
    PIPE,
    Play,
    contributions,
    cut_off,
    restart_coordinator,
    return_after,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm


def test_an_undisturbed_swarm_commits_every_round_and_all_anchors_are_bit_equal(play: Play) -> None:
    swarm = play.to_the_end(None, MIXED, rounds=4)
    assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4]
    assert all(contributions(swarm, name) == [1, 2, 3, 4] for name in ("a", "b"))


def test_the_same_seed_gives_the_same_run_to_the_last_event(tmp_path: Path) -> None:
    async def scenario(swarm: VirtualSwarm) -> list[object]:
        swarm.start()
        await swarm.until_round(2)
        return list(swarm.events)

    def played(number: int, seed: int) -> list[object]:
        return virtual.play(scenario, swarm_spec(MIXED), tmp_path / str(number), MIXED, seed=seed)

    first = played(1, seed=1)
    assert played(2, seed=1) == first
    assert played(3, seed=2) != first


@pytest.mark.parametrize(
    "moment",
    [Moment.PROPOSED, Moment.MATCHED, Moment.SENDING, Moment.GATHERED, Moment.DECIDED, Moment.APPLIED],
)
def test_a_peer_that_is_killed_before_during_or_after_its_exchange_comes_back_and_all_anchors_agree(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("b", 0, 2, moment, Action.KILL)
    swarm = play.to_the_end(lambda swarm: return_after(swarm, "b", 5), rounds=5)
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    assert contributions(swarm, "b")[-1] == 5


@pytest.mark.parametrize("moment", [Moment.INNER_STEP, Moment.GATHERED, Moment.APPLIED])
def test_a_pipeline_goes_on_when_a_killed_member_is_back(play: Play, plan: FaultPlan, moment: Moment) -> None:
    plan.fail_at("q", None, 2, moment, Action.KILL)
    swarm = play.to_the_end(lambda swarm: return_after(swarm, "q", 5), MIXED, rounds=6)
    assert contributions(swarm, "a") == swarm.rounds
    assert contributions(swarm, "q")[-1] == contributions(swarm, "p")[-1] == 6


def test_a_suspended_node_is_fenced_and_catches_up(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", None, 2, Moment.INNER_STEP, Action.STOP, seconds=20)
    swarm = play.to_the_end(rounds=10, **{"timing.heartbeat": 1.0, "timing.lost_after": 5.0})
    assert swarm.committed(0) == swarm.rounds
    assert [event.peer for event in swarm.happened(PeerLost)] == [swarm.peer("b")]
    assert set(contributions(swarm, "b")) < set(swarm.rounds)
    assert contributions(swarm, "b")[-1] == 10


def test_a_replica_that_is_cut_off_for_three_rounds_catches_up_by_replay(play: Play) -> None:
    swarm = play.to_the_end(cut_off, rounds=9)
    assert swarm.committed(0) == swarm.rounds
    assert not {4, 5} & set(contributions(swarm, "b"))
    assert contributions(swarm, "b")[-1] == 9


def test_a_member_that_lacks_the_last_payloads_gets_them_from_those_that_are_done(play: Play) -> None:
    async def separated(swarm: VirtualSwarm) -> None:
        await swarm.until_round(4)
        for other in ("a", "c"):
            swarm.network.separate("b", other)
        await swarm.until(lambda state: state.current_round > 4, "the last decision")
        await swarm.until(lambda state: state.synced[swarm.peer("a")][0] == 4, "the last digest of a")
        await asyncio.sleep(10)
        assert swarm.state.synced[swarm.peer("b")][0] == 3
        swarm.network.heal()

    swarm = play.to_the_end(separated, rounds=4)
    assert swarm.state.synced[swarm.peer("b")][0] == 4


def test_replicas_that_cannot_call_each_other_get_payloads_through_a_third(play: Play) -> None:
    async def blocked(swarm: VirtualSwarm) -> None:
        swarm.network.block_calls("a", "b")

    swarm = play.to_the_end(blocked, rounds=3)
    assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3]


def test_a_replica_that_is_ten_times_slower_counts_and_delays_a_round_by_a_bounded_time(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["c"].speed = 0.1
        swarm.start()
        began = swarm.loop.time()
        await swarm.until_round(4)
        # A step takes 1 s: 10 s of training, at most 10 s of waiting for the slow replica, and the exchange.
        assert (swarm.loop.time() - began) / 3 < 10 + 10 + 8
        weights = swarm.weights("c")
        assert weights
        assert all(0 < weight < 0.5 for weight in weights)

    play(scenario, spec=swarm_spec(FULL, **{"inner.steps": 10, "inner.microbatches": 1}))


def test_calls_that_arrive_twice_change_nothing(play: Play) -> None:
    async def duplicated(swarm: VirtualSwarm) -> None:
        swarm.rpc.duplicated = {"Match", "Report", "Attest", "AwaitDecision", "Heartbeat", "Leave", "Join"}

    swarm = play.to_the_end(duplicated, rounds=3)
    assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3]


@pytest.mark.parametrize("moment", [Moment.PROPOSED, Moment.MATCHED, Moment.GATHERED])
def test_a_coordinator_that_is_killed_in_a_round_decides_that_round_when_it_is_back(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("a", 0, 2, moment, Action.DELAY, seconds=0.0)
    swarm = play.to_the_end(lambda swarm: restart_coordinator(swarm, "a"), rounds=4)
    assert len(swarm.committed(0)) >= 3
    assert not swarm.happened(PeerLost)


@pytest.mark.parametrize(
    ("moment", "nodes_later"),
    [
        (Moment.INNER_STEP, 300),
        (Moment.MATCHED, 0),
        (Moment.GATHERED, 300),
        pytest.param(Moment.INNER_STEP, 0, marks=pytest.mark.slow),
        pytest.param(Moment.PROPOSED, 0, marks=pytest.mark.slow),
        pytest.param(Moment.PROPOSED, 300, marks=pytest.mark.slow),
        pytest.param(Moment.MATCHED, 300, marks=pytest.mark.slow),
        pytest.param(Moment.GATHERED, 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_as_a_whole_trains_the_samples_of_the_open_round_when_it_is_back(
    play: Play, plan: FaultPlan, moment: Moment, nodes_later: float
) -> None:
    plan.fail_at("a", None if moment is Moment.INNER_STEP else 0, 2, moment, Action.DELAY, seconds=0.0)

    async def killed(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("a")
        swarm.coordinator.kill()
        swarm.kill(*FULL)
        await asyncio.sleep(10)
        await swarm.coordinator.start()
        await asyncio.sleep(nodes_later)
        swarm.start(*FULL)

    swarm = play.to_the_end(killed, FULL, rounds=4)
    plans = [event.plan for event in swarm.happened(PlanAdopted)]
    committed = []
    for number in swarm.committed(0):
        [*_, newest] = [each for each in plans if each.from_round <= number]
        for replica in newest.replicas:
            committed += sample_range(newest, swarm.spec, number, replica.index)
    assert committed == list(range(len(committed))), "none is left out, and none is committed twice"


def test_replicas_train_a_bounded_number_of_steps_while_the_coordinator_is_away(play: Play) -> None:
    async def away(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.coordinator.kill()
        await asyncio.sleep(600)
        await swarm.coordinator.start()

    swarm = play.to_the_end(away, rounds=4)
    taken = {key: (line["steps"], line["extra_steps"]) for key, line in swarm.measured().items()}
    assert {taken[name, 3] for name in FULL} == {(swarm.spec.inner.steps, EXTRA_STEPS)}
    assert {extra for (_, round_number), (_, extra) in taken.items() if round_number != 3} == {0}


def test_the_only_holder_of_a_stage_dies_and_the_run_waits_for_it(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, 3, Moment.INNER_STEP, Action.KILL)

    async def away(swarm: VirtualSwarm) -> None:
        await swarm.until_fired("q")
        await asyncio.sleep(300)
        assert swarm.state.current_round == 3
        swarm.start("q")

    assert play.to_the_end(away, PIPE, rounds=4).committed(1)[-1] == 4


def test_all_nodes_die_at_once_and_all_return(play: Play) -> None:
    async def away(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        await asyncio.sleep(1)
        swarm.kill(*MIXED)
        await asyncio.sleep(120)
        swarm.start()

    assert play.to_the_end(away, MIXED, rounds=4).committed(0)[-1] == 4


def test_a_node_without_the_initial_parameters_of_the_run_is_refused_at_the_join(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        with pytest.raises(HetnodeError) as caught:
            await swarm.until_over()
        assert caught.value.code is ErrorCode.INITIAL_UNAVAILABLE
        assert not swarm.decisions

    play(scenario, spec=swarm_spec(FULL, initial=["0" * 64, "1" * 64]))


def test_a_constant_batch_stays_while_replicas_come_and_go(play: Play) -> None:
    async def come_and_go(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        swarm.drain("c", "d")
        await swarm.until_round(4)
        swarm.start("e", "f")

    four, later = (dict.fromkeys(names, Role.REPLICA) for names in ("abcd", "ef"))
    batch = {"grouping.batch": "constant", "grouping.global_batch": 24}
    swarm = play.to_the_end(come_and_go, four, rounds=9, later=later, ending="abef", **batch)
    spec = swarm.spec
    assert {2, 4} <= {len(plan.replicas) for plan in swarm.state.plans}
    samples = {
        each.round_number: sum(entry.descriptor.weight for entry in each.entries) * spec.samples_per_round()
        for each in decisions_in(swarm.events, Committed)
        if each.stage == 0
    }
    # Only the round in which two replicas leave lacks their part.
    assert {number for number, each in samples.items() if each != 24 * spec.inner.steps} <= {2}
    assert len(samples) == spec.rounds
    assert swarm.state.tokens == sum(samples.values()) * spec.model.context
