"""Late nodes and damaged checkpoints on a virtual clock: anchors are loaded, replayed and repaired."""

from __future__ import annotations

import pytest

from coordinator.run.state.commands import Leave
from node.checkpoint.download import CheckpointDownload
from node.net.coordinator_client import CoordinatorClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Part, Role, StateRecord
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.scenario import FULL, TWO, Play, contributions, return_after, swarm_spec
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.transport import VirtualTransport


def test_a_newcomer_loads_a_checkpoint_replays_the_rest_and_contributes(play: Play) -> None:
    members = {**FULL, "late": Role.REPLICA}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*FULL)
        await swarm.until_round(6)
        swarm.start("late")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "late")[-1] == 11
        assert min(contributions(swarm, "late")) > 6

    spec = swarm_spec(FULL, rounds=11, **{"recovery.keep_rounds": 6})
    play(scenario, members, spec)


def test_a_corrupt_checkpoint_of_a_donor_is_refused_and_another_donor_serves(play: Play) -> None:
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
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "late")[-1] == 14

    play(scenario, members, swarm_spec(FULL, rounds=14, **{"recovery.keep_rounds": 6}))


def test_a_full_disk_costs_only_a_checkpoint(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", None, 2, Moment.CHECKPOINT, Action.FULL)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b") == [1, 2, 3, 4]

    play(scenario, TWO, swarm_spec(TWO, rounds=4))


def test_a_node_that_is_killed_while_it_writes_a_checkpoint_continues_from_the_one_before(
    play: Play, plan: FaultPlan
) -> None:
    plan.fail_at("b", None, 4, Moment.CHECKPOINT, Action.KILL)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await return_after(swarm, "b", 3)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b")[-1] == 7

    play(scenario, TWO, swarm_spec(TWO, rounds=7))


def test_a_flipped_bit_in_an_anchor_is_found_within_a_round_and_repaired(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(4)
        swarm.damage_anchor("b", stage=0)
        await swarm.until_round(6)
        assert {event.peer for event in swarm.diverged()} == {swarm.peer("b")}
        assert {event.round_number for event in swarm.diverged()} <= {3, 4}
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b")[-1] == 9

    play(scenario, spec=swarm_spec(FULL, rounds=9))


def test_a_node_waits_for_a_part_of_a_checkpoint_that_no_peer_serves_yet(
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
        await swarm.until_round(13)  # now no peer keeps the payloads from round 5 on: b needs a checkpoint
        swarm.start("b")
        await swarm.until_over(seconds=3000)
        swarm.assert_all_agree()
        assert len(refused) == 9
        assert contributions(swarm, "b")[-1] == 28

    play(scenario, TWO, swarm_spec(TWO, rounds=28, **{"recovery.keep_rounds": 6}))


@pytest.mark.parametrize(
    "code", [ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.STATE_UNAVAILABLE, ErrorCode.UNKNOWN_PEER]
)
def test_a_failure_during_the_repair_of_an_anchor_does_not_end_the_repair(
    play: Play, monkeypatch: pytest.MonkeyPatch, code: ErrorCode
) -> None:
    original, failed = CoordinatorClient.locate, []

    async def locate(self: CoordinatorClient, stage: int, part: Part) -> tuple[StateRecord, ...]:
        if failed == ["next"]:
            failed.append("done")
            if code is ErrorCode.UNKNOWN_PEER:
                await played.coordinator.command_loop.execute(Leave(played.peer("b"), "a test"))
            else:
                raise HetnodeError(code, "No peer answers.", "A test.")
        return await original(self, stage, part)

    monkeypatch.setattr(CoordinatorClient, "locate", locate)
    played: VirtualSwarm

    async def scenario(swarm: VirtualSwarm) -> None:
        nonlocal played
        played = swarm
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
