"""Runs whose links derive T_perp from snapshots of the embedding."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from coordinator.run.rounds.attestation import record_of
from coordinator.run.state.events import DigestAttested
from coordinator.run.state.state import State
from protocol.codec.snapshot import encode, snapshot_digest
from protocol.types import Part, PeerId
from tests.virtual.rollback import attested as attested_by
from tests.virtual.rollback import resume, roll_back
from tests.virtual.scenario import MIXED, PIPE, Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

EVERY = 2


def attested(swarm: VirtualSwarm, part: Part) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for event in swarm.events:
        if isinstance(event, DigestAttested) and event.part == part:
            found.setdefault(event.round_number, set()).add(event.digest)
    return found


@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_members_without_stage_0_train_with_snapshots_that_they_fetch(play: Play, overlap: int) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        rounds = list(range(1, swarm.spec.rounds + 1))
        assert swarm.committed(0) == swarm.committed(1) == rounds
        assert all(contributions(swarm, name) == rounds for name in MIXED)
        made, copied = attested(swarm, Part.SNAPSHOT), attested(swarm, Part.COPY)
        assert all(len(digests) == 1 for digests in made.values())
        assert {2, 4} <= made.keys()
        assert {2, 4} <= copied.keys()
        assert all(made[each] == digests for each, digests in copied.items())
        assert not attested(swarm, Part.EMBEDDING)

    spec = swarm_spec(MIXED, **{"link.embedding_every": EVERY, "outer.overlap": overlap})
    play(scenario, MIXED, spec)


@pytest.mark.parametrize("restore_round", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rollback_has_a_snapshot_that_all_use_at_once(play: Play, restore_round: int) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(5)
        number = await roll_back(swarm, restore_round)
        await swarm.until(attested_by(number, 3), "the rollback")
        await resume(swarm)
        await swarm.until_over()
        swarm.assert_all_agree()
        made, copied = attested(swarm, Part.SNAPSHOT), attested(swarm, Part.COPY)
        assert copied[number] == made[number]
        assert all(contributions(swarm, name)[-1] == swarm.spec.rounds for name in MIXED)

    options = {"link.embedding_every": EVERY, "recovery.checkpoint_every": 1}
    play(scenario, MIXED, swarm_spec(MIXED, rounds=8, **options))


@pytest.mark.parametrize("names", ["pq", *(pytest.param(each, marks=pytest.mark.slow) for each in "pqa")])
def test_members_that_are_killed_come_back_with_the_active_snapshot(play: Play, names: str) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(5)
        swarm.kill(*names)
        await swarm.until_round(8)
        swarm.start(*names)
        await swarm.until_over()
        swarm.assert_all_agree()
        assert all(contributions(swarm, name)[-1] > 8 for name in MIXED)

    play(scenario, MIXED, swarm_spec(MIXED, rounds=16, **{"link.embedding_every": 5}))


def test_a_host_whose_snapshots_are_wrong_is_outvoted_and_trains_on(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(1)
        await swarm.until(lambda state: state.current_round > 1, "all are built")
        shape = swarm.spec.model.vocabulary, swarm.spec.model.width
        wrong_vd = torch.zeros(shape, dtype=torch.bfloat16)
        swarm.trainer("a").embedding_snapshot = lambda _: wrong_vd  # type: ignore[method-assign]
        await swarm.until(lambda state: len(hosts_with(state, 4)) == 3, "all have attested")
        settled = record_of(swarm.state, 0, Part.SNAPSHOT, 4)
        assert settled is not None
        assert settled.digest != snapshot_digest(encode(wrong_vd), *shape)
        assert swarm.peer("a") not in settled.holders
        await swarm.until_over()
        swarm.assert_all_agree()
        rounds = list(range(1, swarm.spec.rounds + 1))
        assert all(contributions(swarm, name) == rounds for name in MIXED)

    play(scenario, MIXED, swarm_spec(MIXED, **{"link.embedding_every": EVERY}))


def test_damaged_files_of_donors_and_of_members_are_replaced_by_those_of_others(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until(lambda state: len(hosts_with(state, 2)) == 3, "all hosts have the snapshot")
        damage(swarm, swarm.nodes.keys() - {"b"})
        await swarm.until(lambda state: bool(state.digests.get((0, 2, Part.COPY))), "a member has fetched it")
        damage(swarm, swarm.nodes.keys() - {"b"})
        await swarm.until_over()
        swarm.assert_all_agree()
        rounds = list(range(1, swarm.spec.rounds + 1))
        assert all(contributions(swarm, name) == rounds for name in MIXED)

    play(scenario, MIXED, swarm_spec(MIXED, **{"link.embedding_every": EVERY}))


def test_a_coordinator_that_starts_again_names_the_donors_as_before(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until(lambda state: len(hosts_with(state, 2)) == 3, "all hosts have the snapshot")
        swarm.coordinator.kill()
        await asyncio.sleep(10)
        await swarm.coordinator.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert attested(swarm, Part.COPY)[2] == attested(swarm, Part.SNAPSHOT)[2]
        assert all(contributions(swarm, name)[-1] == swarm.spec.rounds for name in MIXED)

    play(scenario, MIXED, swarm_spec(MIXED, **{"link.embedding_every": EVERY}))


def test_a_pipeline_that_gets_no_snapshot_follows_and_trains_again_with_the_next_one(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(1)
        await swarm.until(lambda state: state.current_round > 1, "all are built")
        shape = swarm.spec.model.vocabulary, swarm.spec.model.width
        for value, name in enumerate("abp"):  # three hosts, three snapshots: no majority
            different_vd = torch.full(shape, value, dtype=torch.bfloat16)
            swarm.trainer(name).embedding_snapshot = lambda _, vd=different_vd: vd  # type: ignore[method-assign]
        await swarm.until(lambda state: len(hosts_with(state, 2)) == 3, "all have attested")
        for name in "abp":
            del swarm.trainer(name).embedding_snapshot
        await swarm.until_over()
        swarm.assert_all_agree()
        assert 4 not in contributions(swarm, "p")
        assert contributions(swarm, "p")[-1] == swarm.spec.rounds

    play(scenario, MIXED, swarm_spec(MIXED, rounds=10, **{"link.embedding_every": EVERY}))


def test_a_host_that_lost_a_snapshot_makes_it_again_of_its_checkpoint(play: Play) -> None:
    def files_of(swarm: VirtualSwarm, name: str) -> Path:
        return swarm.folder / name / "checkpoint"

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(5)
        while not (files_of(swarm, "p") / "round-000004").exists():  # noqa: ASYNC110  no event tells it
            await asyncio.sleep(0.05)
        swarm.kill("p", "q")
        # As after a crash between the round and the file, before anybody else has fetched it.
        lost = [path for name in "pq" for path in files_of(swarm, name).glob("snapshots/round-000004-*")]
        assert lost
        for path in lost:
            path.unlink()
        swarm.start("p", "q")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "p")[-1] == swarm.spec.rounds

    options = {"link.embedding_every": EVERY, "recovery.checkpoint_every": 1}
    play(scenario, PIPE, swarm_spec(PIPE, rounds=8, **options))


def hosts_with(state: State, round_number: int) -> Collection[PeerId]:
    return set(state.digests.get((0, round_number, Part.SNAPSHOT), {}))


def damage(swarm: VirtualSwarm, names: Collection[str]) -> None:
    """Overwrite the snapshots on the disks of these nodes."""
    found = [path for name in names for path in swarm.folder.glob(f"**/{name}/**/snapshots/round-*")]
    assert found
    for path in found:
        path.write_bytes(bytes(path.stat().st_size))
