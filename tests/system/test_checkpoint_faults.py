"""Late nodes and damaged checkpoints on a virtual clock: anchors are loaded, replayed and repaired."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.run.state.commands import Leave
from node.checkpoint.download import CheckpointDownload
from node.net.coordinator_client import CoordinatorClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Part, Role, StateRecord
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.scenario import FULL, TWO, Play, contributions, return_after
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.transport import VirtualTransport


def test_a_newcomer_refuses_corrupt_checkpoints_loads_another_and_replays_the_rest(
    play: Play,
) -> None:
    async def damaged(swarm: VirtualSwarm) -> None:
        await swarm.until_round(9)
        for name in ("a", "b"):
            for path in swarm.nodes[name].folder.glob("checkpoint/round-*/stage-*.safetensors"):
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
        swarm.start("late")

    late = {"late": Role.REPLICA}
    swarm = play.to_the_end(damaged, FULL, rounds=12, later=late, **{"recovery.keep_rounds": 6})
    assert contributions(swarm, "late")[-1] == 12
    assert min(contributions(swarm, "late")) > 9


def test_a_newcomer_that_starts_again_goes_on_with_the_checkpoint_that_it_has_begun_to_fetch(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one would cost all that is here already."""
    original, asked = VirtualTransport.fetch_checkpoint, []

    async def fetch_checkpoint(self: VirtualTransport, download: CheckpointDownload, deadline: float) -> None:
        asked.append((download.record.stage, download.record.round_number))
        if len(asked) <= 2:  # both stages
            download.into.touch()
            await asyncio.Event().wait()
        await original(self, download, deadline)

    async def again(swarm: VirtualSwarm) -> None:
        await swarm.until_round(7)
        swarm.start("late")
        await swarm.until_round(9)
        swarm.kill("late")
        swarm.start("late")

    monkeypatch.setattr(VirtualTransport, "fetch_checkpoint", fetch_checkpoint)
    late = {"late": Role.REPLICA}
    swarm = play.to_the_end(again, FULL, rounds=14, later=late, **{"recovery.keep_rounds": 6})
    assert sorted(asked) == [(0, 6), (0, 6), (1, 6), (1, 6)]
    assert contributions(swarm, "late")[-1] == 14
    assert not list(swarm.nodes["late"].folder.glob("checkpoint/incoming/*"))


def test_a_full_disk_costs_only_a_checkpoint(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", None, 2, Moment.CHECKPOINT, Action.FULL)
    swarm = play.to_the_end(None, TWO, rounds=4)
    assert contributions(swarm, "b") == [1, 2, 3, 4]


def test_a_node_that_is_killed_while_it_writes_a_checkpoint_continues_from_the_one_before(
    play: Play, plan: FaultPlan
) -> None:
    plan.fail_at("b", None, 4, Moment.CHECKPOINT, Action.KILL)
    swarm = play.to_the_end(lambda swarm: return_after(swarm, "b", 3), TWO, rounds=7)
    assert contributions(swarm, "b")[-1] == 7


def test_a_node_waits_for_a_part_of_a_checkpoint_that_no_peer_serves_yet(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, refused = VirtualTransport.fetch_checkpoint, []

    async def fetch_checkpoint(self: VirtualTransport, download: CheckpointDownload, deadline: float) -> None:
        if download.record.stage == 1 and len(refused) < 9:
            refused.append(download.record)
            raise HetnodeError(ErrorCode.STATE_UNAVAILABLE, "No donor has it.", "A test.")
        await original(self, download, deadline)

    async def away(swarm: VirtualSwarm) -> None:
        await swarm.until_round(3)
        swarm.kill("b")
        await swarm.until_round(13)  # now no peer keeps the payloads from round 5 on: b needs a checkpoint
        swarm.start("b")

    monkeypatch.setattr(VirtualTransport, "fetch_checkpoint", fetch_checkpoint)
    swarm = play.to_the_end(away, TWO, rounds=24, **{"recovery.keep_rounds": 6})
    assert len(refused) == 9
    assert contributions(swarm, "b")[-1] == 24


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.STATE_UNAVAILABLE,
        ErrorCode.UNKNOWN_PEER,
        pytest.param(ErrorCode.COORDINATOR_UNREACHABLE, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_in_an_anchor_is_found_within_a_round_and_a_failure_does_not_end_its_repair(
    play: Play, monkeypatch: pytest.MonkeyPatch, code: ErrorCode
) -> None:
    original, failing, failed = CoordinatorClient.locate, list[VirtualSwarm](), []

    async def locate(self: CoordinatorClient, stage: int, part: Part) -> tuple[StateRecord, ...]:
        if failing and not failed:
            failed.append(code)
            if code is not ErrorCode.UNKNOWN_PEER:
                raise HetnodeError(code, "No peer answers.", "A test.")
            await failing[0].coordinator.command_loop.execute(Leave(failing[0].peer("b"), "a test"))
        return await original(self, stage, part)

    async def damaged(swarm: VirtualSwarm) -> None:
        await swarm.until_round(4)
        failing.append(swarm)
        swarm.damage_anchor("b", stage=0)

    monkeypatch.setattr(CoordinatorClient, "locate", locate)
    swarm = play.to_the_end(damaged, rounds=7)
    assert failed == [code]
    assert {event.peer for event in swarm.diverged()} == {swarm.peer("b")}
    assert {event.round_number for event in swarm.diverged()} <= {3, 4}
    assert contributions(swarm, "b")[-1] == 7
