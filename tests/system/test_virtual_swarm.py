"""What happens to a swarm on the internet, played on a virtual clock by production nodes: nothing forks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.state.commands import Leave
from coordinator.state.events import PayloadWithheld, PeerLost, PeerRetreated
from coordinator.state.text import short
from coordinator.status.messages import run_message
from node.net.coordinator_client import CoordinatorClient
from node.transport.transport import CheckpointDownload
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Lifecycle, Part, Role, StateRecord
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual import swarm as virtual
from tests.virtual.hive import VirtualTransport
from tests.virtual.network import here
from tests.virtual.scenario import FULL, MIXED, PIPE, TWO, Play, contributions, return_after, swarm_spec
from tests.virtual.swarm import VirtualSwarm


def test_an_undisturbed_swarm_commits_every_round_and_all_anchors_are_bit_equal(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4, 5, 6]
        assert all(contributions(swarm, name) == [1, 2, 3, 4, 5, 6] for name in ("a", "b"))

    play(scenario, MIXED)


def test_the_same_seed_gives_the_same_run_to_the_last_event(tmp_path: Path) -> None:
    async def scenario(swarm: VirtualSwarm) -> list[object]:
        swarm.start()
        await swarm.until_round(3)
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
def test_a_contributor_killed_around_its_payload_comes_back_and_nothing_forks(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("b", 0, 3, moment, Action.KILL)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await return_after(swarm, "b", 5)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == list(range(1, 9))
        assert contributions(swarm, "b")[-1] == 8

    play(scenario, spec=swarm_spec(FULL, rounds=8))


@pytest.mark.parametrize("moment", [Moment.INNER_STEP, Moment.GATHERED, Moment.APPLIED])
def test_a_member_of_a_pipeline_dies_and_the_replica_goes_on_when_it_is_back(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("q", None, 3, moment, Action.KILL)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await return_after(swarm, "q", 5)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "a") == list(range(1, 11))
        assert contributions(swarm, "q")[-1] == contributions(swarm, "p")[-1] == 10

    play(scenario, MIXED, swarm_spec(MIXED, rounds=10))


def test_a_suspended_node_is_fenced_and_catches_up(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", None, 3, Moment.INNER_STEP, Action.STOP, seconds=60)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == list(range(1, 31))
        lost = [event.peer for event in swarm.events if isinstance(event, PeerLost)]
        assert lost == [swarm.peer("b")]
        rounds = contributions(swarm, "b")
        assert set(rounds) < set(range(1, 31))
        assert rounds[-1] == 30

    play(scenario, spec=swarm_spec(FULL, rounds=30))


def test_a_replica_that_is_cut_off_for_three_rounds_catches_up_by_replay(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        swarm.network.isolate("b")
        await swarm.until_round(6)
        swarm.network.heal()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == list(range(1, 13))
        assert not {4, 5} & set(contributions(swarm, "b"))
        assert contributions(swarm, "b")[-1] == 12

    play(scenario, spec=swarm_spec(FULL, rounds=12))


def test_replicas_that_cannot_call_each_other_get_payloads_through_a_third(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.network.close("a", "b")
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4, 5, 6]

    play(scenario)


def test_a_replica_ten_times_slower_still_counts_and_holds_a_round_up_by_a_bounded_time(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.nodes["c"].speed = 0.1
        swarm.start()
        began = swarm.loop.time()
        await swarm.until_round(6)
        # One second a step: 10 s of work, at most 10 s more for the slow, and a little for the exchange.
        assert (swarm.loop.time() - began) / 5 < 10 + 10 + 8
        weights = [
            entry.descriptor.weight
            for each in swarm.decisions
            for entry in each.entries
            if entry.descriptor.owner == swarm.peer("c")
        ]
        assert weights
        assert all(0 < weight < 0.5 for weight in weights)

    play(scenario, spec=swarm_spec(FULL, **{"inner.steps": 10}))


def test_calls_that_arrive_twice_change_nothing(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.rpc.duplicated = {"Match", "Report", "Attest", "AwaitDecision", "Heartbeat", "Leave", "Join"}
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4, 5, 6]

    play(scenario)


@pytest.mark.parametrize("moment", [Moment.PROPOSED, Moment.MATCHED, Moment.GATHERED])
def test_a_coordinator_killed_in_a_round_settles_that_round_when_it_is_back(
    play: Play, plan: FaultPlan, moment: Moment
) -> None:
    plan.fail_at("a", 0, 3, moment, Action.DELAY, seconds=0.0)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_fired("a")
        swarm.coordinator.kill()
        await asyncio.sleep(10)
        await swarm.coordinator.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert len(swarm.committed(0)) >= 5
        assert not any(isinstance(event, PeerLost) for event in swarm.events)

    play(scenario)


def test_while_the_coordinator_is_away_for_long_replicas_train_up_to_a_bound_and_hold(play: Play) -> None:
    spec = swarm_spec(FULL, rounds=4, **{"recovery.extra_steps": 6})

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.coordinator.kill()
        await asyncio.sleep(600)
        await swarm.coordinator.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        lines = (swarm.folder / "coordinator" / "metrics.jsonl").read_text().splitlines()
        measured = [
            line for line in map(json.loads, lines) if line["event"] == "measurement" and line["round"]
        ]
        taken = {(line["peer"], line["round"]): (line["steps"], line["extra_steps"]) for line in measured}
        assert {taken[swarm.peer(name), 3] for name in FULL} == {(spec.inner.steps, 6)}
        assert {extra for (_, round_number), (_, extra) in taken.items() if round_number != 3} == {0}

    play(scenario, spec=spec)


def test_the_only_holder_of_a_stage_dies_and_the_run_waits_for_it(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("q", None, 4, Moment.INNER_STEP, Action.KILL)
    members = {"p": Role.STAGE, "q": Role.STAGE}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_fired("q")
        await asyncio.sleep(300)
        assert swarm.state.current_round == 4
        swarm.start("q")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(1)[-1] == 6

    play(scenario, members)


@pytest.mark.parametrize("with_coordinator", [False, True])
def test_everybody_dies_at_once_and_everybody_returns(play: Play, with_coordinator: bool) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(4)
        await asyncio.sleep(1)
        swarm.kill(*MIXED)
        if with_coordinator:
            swarm.coordinator.kill()
        await asyncio.sleep(120)
        if with_coordinator:
            await swarm.coordinator.start()
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0)[-1] == 8

    play(scenario, MIXED, swarm_spec(MIXED, rounds=8))


def test_a_newcomer_loads_a_checkpoint_replays_the_rest_and_contributes(play: Play) -> None:
    members = {**FULL, "late": Role.REPLICA}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*FULL)
        await swarm.until_round(6)
        swarm.start("late")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "late")[-1] == 14
        assert min(contributions(swarm, "late")) > 6

    spec = swarm_spec(FULL, rounds=14, **{"recovery.keep_rounds": 6})
    play(scenario, members, spec)


def test_a_checkpoint_donor_whose_disk_lies_is_found_out_and_another_one_serves(play: Play) -> None:
    members = {**FULL, "late": Role.REPLICA}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*FULL)
        await swarm.until_round(9)
        for name in ("a", "b"):
            for path in swarm.nodes[name].folder.glob("checkpoint/round-*/stage-*.safetensors"):
                damaged = bytearray(path.read_bytes())
                damaged[-1] ^= 1
                path.write_bytes(damaged)
        swarm.start("late")
        await swarm.until_round(14)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "late")[-1] == 18

    play(scenario, members, swarm_spec(FULL, rounds=18, **{"recovery.keep_rounds": 6}))


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", None, 2, Moment.CHECKPOINT, Action.FULL)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b") == [1, 2, 3, 4, 5, 6]

    play(scenario)


def test_a_node_killed_while_it_writes_goes_on_from_the_checkpoint_before(
    play: Play, plan: FaultPlan
) -> None:
    plan.fail_at("b", None, 4, Moment.CHECKPOINT, Action.KILL)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await return_after(swarm, "b", 3)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b")[-1] == 8

    play(scenario, spec=swarm_spec(FULL, rounds=8))


def test_a_bit_turned_in_a_live_anchor_is_noticed_within_a_round_and_mended(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(4)
        swarm.damage_anchor("b", stage=0)
        await swarm.until_round(6)
        assert {event.peer for event in swarm.diverged()} == {swarm.peer("b")}
        assert {event.round_number for event in swarm.diverged()} <= {3, 4}
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b")[-1] == 12

    play(scenario, spec=swarm_spec(FULL, rounds=12))


def test_who_has_not_the_parameters_from_which_the_run_starts_is_told_so_as_it_joins(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        with pytest.raises(HetnodeError) as caught:
            await swarm.until_over()
        assert caught.value.code is ErrorCode.INITIAL_UNAVAILABLE
        assert not swarm.decisions

    play(scenario, spec=swarm_spec(FULL, initial=["0" * 64, "1" * 64]))


def test_a_run_waits_with_a_reason_for_whoever_is_missing(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        swarm.kill(*FULL)
        await asyncio.sleep(60)
        lives = {peer.lifecycle for peer in swarm.state.peers.values()}
        assert lives == {Lifecycle.GONE}
        lacks = [
            f"{place.replica} waits for {short(place.peer)} (stages 0-1), which is gone"
            for place in sorted(swarm.state.reservations.values(), key=lambda place: place.replica)
        ]
        assert run_message(swarm.state, swarm.spec) == (
            "waiting in round 3 of 6: no complete replica is left: "
            f"replica-{lacks[0]}, replica-{lacks[1]}, replica-{lacks[2]}"
        )

    play(scenario)


def test_nobody_is_admitted_once_the_run_is_over(play: Play) -> None:
    members = {**FULL, "late": Role.REPLICA}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*FULL)
        await swarm.until_over()
        swarm.start("late")
        task = swarm.nodes["late"].task
        assert task is not None
        await asyncio.wait({task})
        assert [error.code for error in swarm.nodes["late"].errors] == [ErrorCode.RUN_STARTED]

    play(scenario, members, swarm_spec(FULL))


def retreats(swarm: VirtualSwarm) -> list[tuple[str, int]]:
    """Who has given up a seat, and the epoch of its plan."""
    names = {swarm.peer(name): name for name in swarm.nodes}
    return [(names[event.peer], event.epoch) for event in swarm.events if isinstance(event, PeerRetreated)]


@pytest.mark.parametrize("members", [PIPE, MIXED], ids=["alone", "beside others"])
def test_a_link_that_breaks_while_the_coordinator_is_away_is_given_up_when_it_is_back(
    play: Play, members: Mapping[str, Role]
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(2)
        await asyncio.sleep(0.6)
        swarm.coordinator.kill()
        swarm.network.reset("p", "q")
        await asyncio.sleep(60)
        await swarm.coordinator.start()
        await swarm.until_over(seconds=3000)
        swarm.assert_all_agree()
        assert {epoch for _, epoch in retreats(swarm)} == {1}
        assert contributions(swarm, "p")[-1] == contributions(swarm, "q")[-1] == 6

    play(scenario, members, swarm_spec(members, rounds=6))


def test_a_full_replica_that_lacks_one_payload_gives_up_its_seat_and_gets_another(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = failing_once("c", "fetch_payload", ErrorCode.PAYLOAD_UNAVAILABLE)
    monkeypatch.setattr(VirtualTransport, "fetch_payload", failing)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over(seconds=3000)
        swarm.assert_all_agree()
        assert retreats(swarm) == [("c", 1)]
        assert not any(isinstance(event, PayloadWithheld) for event in swarm.events)
        assert all(contributions(swarm, name)[-2:] == [5, 6] for name in FULL)

    play(scenario)


def failing_once(name: str, method: str, code: ErrorCode) -> Callable[..., Awaitable[Any]]:
    """The method of VirtualTransport, which fails at the first call of the node `name`."""
    original, failed = getattr(VirtualTransport, method), []

    async def call(self: VirtualTransport, *args: Any) -> Any:
        if here() == name and not failed:
            failed.append(True)
            raise HetnodeError(code, "Nobody has it.", "A test.")
        return await original(self, *args)

    return call


def test_the_seat_given_up_is_that_of_the_newest_plan_that_kept_the_replica(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(2)
        swarm.kill("b")
        await swarm.until(lambda state: len(state.plans) == 2 and state.current_round >= 3)
        await asyncio.sleep(1.6)
        assert len(swarm.state.plans[1].replicas) == 2
        swarm.network.reset("p", "q")
        await swarm.until_over("a", "p", "q", seconds=3000)
        swarm.assert_all_agree("a", "p", "q")
        assert sorted(retreats(swarm)) == [("p", 2), ("q", 2)]
        assert not any(isinstance(event, PayloadWithheld) for event in swarm.events)
        assert contributions(swarm, "p")[-1] == contributions(swarm, "q")[-1] == 7

    play(scenario, MIXED, swarm_spec(MIXED, rounds=7))


def test_a_part_of_a_checkpoint_that_nobody_gives_for_a_while_does_not_end_the_node(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, refused = VirtualTransport.fetch_checkpoint, []

    async def fetch_checkpoint(self: VirtualTransport, download: CheckpointDownload, deadline: float) -> None:
        record = download.record
        if record.stage == 1 and len(refused) < 9:
            refused.append(record)
            raise HetnodeError(ErrorCode.STATE_UNAVAILABLE, "No donor has it.", "A test.")
        await original(self, download, deadline)

    monkeypatch.setattr(VirtualTransport, "fetch_checkpoint", fetch_checkpoint)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        swarm.kill("b")
        await swarm.until_round(11)
        swarm.start("b")
        await swarm.until_over(seconds=3000)
        swarm.assert_all_agree()
        assert len(refused) == 9
        assert contributions(swarm, "b")[-1] == 26

    play(scenario, TWO, swarm_spec(TWO, rounds=26, **{"recovery.keep_rounds": 6}))


@pytest.mark.parametrize(
    "code", [ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.STATE_UNAVAILABLE, ErrorCode.UNKNOWN_PEER]
)
def test_what_fails_while_a_node_mends_its_anchors_is_mended_as_well(
    play: Play, monkeypatch: pytest.MonkeyPatch, code: ErrorCode
) -> None:
    original, failed = CoordinatorClient.locate, []

    async def locate(self: CoordinatorClient, stage: int, part: Part) -> tuple[StateRecord, ...]:
        if failed == ["next"]:
            failed.append("done")
            if code is ErrorCode.UNKNOWN_PEER:
                await here_too.coordinator.command_loop.execute(Leave(here_too.peer("b"), "a test"))
            else:
                raise HetnodeError(code, "Nobody answers.", "A test.")
        return await original(self, stage, part)

    monkeypatch.setattr(CoordinatorClient, "locate", locate)
    here_too: VirtualSwarm

    async def scenario(swarm: VirtualSwarm) -> None:
        nonlocal here_too
        here_too = swarm
        swarm.start()
        await swarm.until_round(4)
        failed.append("next")
        swarm.damage_anchor("b", stage=0)
        await swarm.until_over(seconds=3000)
        swarm.assert_all_agree()
        assert failed == ["next", "done"]
        assert {event.peer for event in swarm.diverged()} == {swarm.peer("b")}
        assert contributions(swarm, "b")[-1] == 9

    play(scenario, spec=swarm_spec(FULL, rounds=9))
