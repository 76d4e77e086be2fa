"""Runs whose links derive T_perp from snapshots of the embedding."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from coordinator.run.rounds.attestation import record_of
from coordinator.run.state.events import DigestAttested
from coordinator.run.state.state import State
from node.checkpoint import snapshots
from node.checkpoint.snapshot_codec import encode, snapshot_digest
from protocol.types import Part, PeerId
from tests.virtual.scenario import MIXED, PIPE, Play, contributions, roll_back_and_resume
from tests.virtual.swarm import VirtualSwarm

EVERY_2 = {"link.embedding_every": 2}
EVERY_CHECKPOINT = {"recovery.checkpoint_every": 1}


def attested(swarm: VirtualSwarm, part: Part) -> dict[int, set[str]]:
    """The digests of a part, by round."""
    found: dict[int, set[str]] = {}
    for event in swarm.happened(DigestAttested):
        if event.part == part:
            found.setdefault(event.round_number, set()).add(event.digest)
    return found


def hosts_with(state: State, round_number: int) -> Collection[PeerId]:
    return set(state.digests.get((0, round_number, Part.SNAPSHOT), {}))


async def until_all_hosts_have(swarm: VirtualSwarm, round_number: int) -> None:
    await swarm.until(lambda state: len(hosts_with(state, round_number)) == 3, "all have attested")


async def until_built(swarm: VirtualSwarm) -> tuple[int, int]:
    """Wait until all nodes have built their stages. Returns the shape of the embedding."""
    await swarm.until_round(1)
    await swarm.until(lambda state: state.current_round > 1, "all are built")
    return swarm.spec.model.vocabulary, swarm.spec.model.width


def assert_all_count(swarm: VirtualSwarm) -> None:
    assert all(contributions(swarm, name) == swarm.rounds for name in MIXED)


def test_a_full_disk_costs_a_host_its_snapshot_and_not_the_run(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt, refused = snapshots.adopt, list[int]()

    def adopted(folder: Path, round_number: int, digest: str, file: Path) -> Path:
        if "a" in folder.parts and round_number == 2:
            refused.append(round_number)
            raise OSError(errno.ENOSPC, "No space left on device")
        return adopt(folder, round_number, digest, file)

    monkeypatch.setattr(snapshots, "adopt", adopted)
    swarm = play.to_the_end(None, MIXED, **EVERY_2)
    assert refused
    assert_all_count(swarm)
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds


@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_members_without_stage_0_train_with_snapshots_that_they_fetch(play: Play, overlap: int) -> None:
    swarm = play.to_the_end(None, MIXED, **EVERY_2, **{"outer.overlap": overlap})
    assert swarm.committed(0) == swarm.committed(1) == swarm.rounds
    assert_all_count(swarm)
    made, copied = attested(swarm, Part.SNAPSHOT), attested(swarm, Part.COPY)
    assert all(len(digests) == 1 for digests in made.values())
    assert {2, 4} <= made.keys()
    assert {2, 4} <= copied.keys()
    assert all(made[each] == digests for each, digests in copied.items())
    assert not attested(swarm, Part.EMBEDDING)


@pytest.mark.parametrize("restore_round", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rollback_has_a_snapshot_that_all_use_at_once(play: Play, restore_round: int) -> None:
    swarm = play.to_the_end(
        lambda swarm: roll_back_and_resume(swarm, 5, restore_round), MIXED, 8, **EVERY_2, **EVERY_CHECKPOINT
    )
    (number,) = swarm.state.restored
    assert attested(swarm, Part.COPY)[number] == attested(swarm, Part.SNAPSHOT)[number]
    assert all(contributions(swarm, name)[-1] == 8 for name in MIXED)


@pytest.mark.parametrize("names", ["pq", *(pytest.param(each, marks=pytest.mark.slow) for each in "pqa")])
def test_members_that_are_killed_come_back_with_the_active_snapshot(play: Play, names: str) -> None:
    async def killed(swarm: VirtualSwarm) -> None:
        await swarm.until_round(5)
        swarm.kill(*names)
        await swarm.until_round(8)
        swarm.start(*names)

    swarm = play.to_the_end(killed, MIXED, 12, **{"link.embedding_every": 5})
    assert all(contributions(swarm, name)[-1] > 8 for name in MIXED)


def test_a_host_whose_snapshots_are_wrong_is_outvoted_and_trains_on(play: Play) -> None:
    async def wrong(swarm: VirtualSwarm) -> None:
        shape = await until_built(swarm)
        wrong_vd = torch.zeros(shape, dtype=torch.bfloat16)
        swarm.trainer("a").embedding_snapshot = lambda _: wrong_vd  # type: ignore[method-assign]
        await until_all_hosts_have(swarm, 4)
        settled = record_of(swarm.state, 0, Part.SNAPSHOT, 4)
        assert settled is not None
        assert settled.digest != snapshot_digest(encode(wrong_vd), *shape)
        assert swarm.peer("a") not in settled.holders

    assert_all_count(play.to_the_end(wrong, MIXED, **EVERY_2))


def test_damaged_files_of_donors_and_of_members_are_replaced_by_those_of_others(play: Play) -> None:
    def damage(swarm: VirtualSwarm) -> None:
        """Overwrite the snapshots on the disks of all nodes but b."""
        names = swarm.nodes.keys() - {"b"}
        found = [path for name in names for path in swarm.folder.glob(f"**/{name}/**/snapshots/round-*")]
        assert found
        for path in found:
            path.write_bytes(bytes(path.stat().st_size))

    async def damaged(swarm: VirtualSwarm) -> None:
        await until_all_hosts_have(swarm, 2)
        damage(swarm)
        await swarm.until(lambda state: bool(state.digests.get((0, 2, Part.COPY))), "a member has fetched it")
        damage(swarm)

    assert_all_count(play.to_the_end(damaged, MIXED, **EVERY_2))


def test_a_coordinator_that_starts_again_names_the_donors_as_before(play: Play) -> None:
    async def restarted(swarm: VirtualSwarm) -> None:
        await until_all_hosts_have(swarm, 2)
        swarm.coordinator.kill()
        await asyncio.sleep(10)
        await swarm.coordinator.start()

    swarm = play.to_the_end(restarted, MIXED, **EVERY_2)
    assert attested(swarm, Part.COPY)[2] == attested(swarm, Part.SNAPSHOT)[2]
    assert all(contributions(swarm, name)[-1] == swarm.spec.rounds for name in MIXED)


def test_a_pipeline_that_gets_no_snapshot_follows_and_trains_again_with_the_next_one(play: Play) -> None:
    async def without_majority(swarm: VirtualSwarm) -> None:
        shape = await until_built(swarm)
        for value, name in enumerate("abp"):  # three hosts, three snapshots
            different_vd = torch.full(shape, value, dtype=torch.bfloat16)
            swarm.trainer(name).embedding_snapshot = lambda _, vd=different_vd: vd  # type: ignore[method-assign]
        await until_all_hosts_have(swarm, 2)
        for name in "abp":
            del swarm.trainer(name).embedding_snapshot

    swarm = play.to_the_end(without_majority, MIXED, 8, **EVERY_2)
    assert 4 not in contributions(swarm, "p")
    assert contributions(swarm, "p")[-1] == 8


def test_a_host_that_lost_a_snapshot_makes_it_again_of_its_checkpoint(play: Play) -> None:
    def files_of(swarm: VirtualSwarm, name: str) -> Path:
        return swarm.folder / name / "checkpoint"

    async def lost(swarm: VirtualSwarm) -> None:
        await swarm.until_round(5)
        while not (files_of(swarm, "p") / "round-000004").exists():  # noqa: ASYNC110  no event tells it
            await asyncio.sleep(0.05)
        swarm.kill("p", "q")
        # As after a crash between the round and the file, before anybody else has fetched it.
        found = [path for name in "pq" for path in files_of(swarm, name).glob("snapshots/round-000004-*")]
        assert found
        for path in found:
            path.unlink()
        swarm.start("p", "q")

    swarm = play.to_the_end(lost, PIPE, 8, **EVERY_2, **EVERY_CHECKPOINT)
    assert contributions(swarm, "p")[-1] == 8
