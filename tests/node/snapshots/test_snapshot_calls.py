"""Snapshots of the embedding in the worker: who makes them, and links that derive T_perp from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.checkpoint import parts, snapshots
from node.checkpoint.layout import round_folder
from node.checkpoint.snapshot_codec import snapshot
from node.core.worker.factories import run_basis
from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream
from node.ipc.worker_calls import Digests, UseSnapshot, WriteSnapshot
from node.snapshots.snapshot_calls import SnapshotCalls
from node.worker.process import NodeWorker
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.subspace import ReceivingEnd
from protocol.types import Part
from tests.support.hand_driven_replica import (
    SPEC,
    assert_same_bits,
    chain,
    commit,
    inner_phase,
    inner_step,
    proposals,
    state,
)
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")

WITH_SNAPSHOTS = spec_of(
    **{
        "swarm.stages": 2,
        "inner.microbatches": 3,
        "link.embedding_every": 2,
    }
)


def workers_of(members: list[Trainer]) -> list[NodeWorker]:
    workers = []
    for member in members:
        worker = NodeWorker()
        worker.trainer = member
        workers.append(worker)
    return workers


def run_round(members: list[Trainer], round_number: int) -> None:
    inner_phase(members, round_number)
    payloads = {stage: [payload] for stage, payload in proposals(members).items()}
    commit(members, round_number, payloads, True)


def use(worker: NodeWorker, stored: snapshots.StoredSnapshot) -> None:
    SnapshotCalls(worker).use_snapshot(UseSnapshot(stored.path, stored.digest))


def expansion(end: ReceivingEnd | None) -> torch.Tensor:
    """What a receiving end makes of zeros: rows of T_perp."""
    assert end is not None
    return end.expand_forward(torch.zeros(1, 3, SPEC.link.k), torch.tensor([[0, 7, 5]]))


def link_of(table_vd: torch.Tensor) -> ReceivingEnd:
    return ReceivingEnd(SPEC.link.k, run_basis(SPEC, 1), table_vd)


def test_all_members_make_the_same_first_snapshot(stream: SampleStream, tmp_path: Path) -> None:
    """So all members have the snapshot of round 0 without a download."""
    workers = workers_of(chain(stream, 2))
    folders = [tmp_path / str(i) for i in range(2)]
    digests = {
        SnapshotCalls(worker).write_snapshot(WriteSnapshot(folder, 0))
        for worker, folder in zip(workers, folders, strict=True)
    }
    assert digests == {snapshots.held(folder)[0].digest for folder in folders}
    assert len(digests) == 1


def test_a_link_keeps_its_snapshot_over_commits_and_new_plans(stream: SampleStream, tmp_path: Path) -> None:
    members = chain(stream, 2)
    first, last = workers_of(members)
    initial_vd = members[0].outer.embedding.clone()
    SnapshotCalls(first).write_snapshot(WriteSnapshot(tmp_path, 0))
    use(last, snapshots.held(tmp_path)[0])
    expected = expansion(link_of(initial_vd.to(torch.bfloat16)))
    run_round(members, 1)
    assert not torch.equal(members[0].outer.embedding, initial_vd)
    assert torch.equal(expansion(members[1].hosted.upstream), expected)
    members[1].connect(SPEC.link.k, None)
    assert torch.equal(expansion(members[1].hosted.upstream), expected)
    SnapshotCalls(first).write_snapshot(WriteSnapshot(tmp_path, 1))
    use(last, snapshots.held(tmp_path)[1])
    of_round_1 = link_of(members[0].outer.embedding.to(torch.bfloat16))
    assert torch.equal(expansion(members[1].hosted.upstream), expansion(of_round_1))
    members[1].begin_round(2, range(SPEC.samples_per_round()))
    members[0].begin_round(2, range(SPEC.samples_per_round()))
    inner_step(members, 0)


def test_the_snapshot_of_round_0_can_be_made_in_every_round(stream: SampleStream, tmp_path: Path) -> None:
    """A late joiner needs it if no other snapshot is active yet."""
    members = chain(stream, 2)
    digests = []
    for round_number in (0, 1):
        if round_number:
            run_round(members, round_number)
        digests += [
            SnapshotCalls(each).write_snapshot(WriteSnapshot(tmp_path, 0)) for each in workers_of(members)
        ]
    assert len(set(digests)) == 1


def test_a_wrong_file_leaves_the_link_as_it_was(stream: SampleStream, tmp_path: Path) -> None:
    members = chain(stream, 2)
    first, last = workers_of(members)
    digest = SnapshotCalls(first).write_snapshot(WriteSnapshot(tmp_path, 0))
    stored = snapshots.held(tmp_path)[0]
    use(last, stored)
    before = expansion(members[1].hosted.upstream)
    stored.path.write_bytes(b"\x01" * stored.path.stat().st_size)
    with pytest.raises(HetnodeError) as refused:
        SnapshotCalls(last).use_snapshot(UseSnapshot(stored.path, digest))
    assert refused.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert torch.equal(expansion(members[1].hosted.upstream), before)


@pytest.fixture
def pair(stream: SampleStream) -> list[Trainer]:
    """The members of a replica of a run whose links use snapshots."""
    return chain(stream, 2, WITH_SNAPSHOTS)


def commit_hosted(members: list[Trainer], round_number: int) -> None:
    """Every member applies the round to the stages that it hosts, and to nothing else."""
    payloads = proposals(members)
    for member in members:
        for stage in member.stages:
            member.commit(stage, round_number, [(payloads[stage], 1.0)], True)


def test_where_links_use_snapshots_a_member_without_stage_0_holds_its_stages_alone(
    pair: list[Trainer], tmp_path: Path
) -> None:
    first, last = workers_of(pair)
    assert last.digests(Digests()).keys() == {(1, Part.STAGE)}
    assert first.digests(Digests()).keys() == {(0, Part.STAGE)}
    of_round_0 = link_of(snapshot(pair[0].outer.embedding))
    assert torch.equal(expansion(pair[1].hosted.upstream), expansion(of_round_0))
    inner_phase(pair, 1)
    commit_hosted(pair, 1)
    SnapshotCalls(first).write_snapshot(WriteSnapshot(tmp_path, 1))
    use(last, snapshots.held(tmp_path)[1])
    of_round_1 = link_of(snapshot(pair[0].outer.embedding))
    assert torch.equal(expansion(pair[1].hosted.upstream), expansion(of_round_1))
    inner_phase(pair, 2)


def test_its_checkpoint_needs_no_embedding(pair: list[Trainer], stream: SampleStream, tmp_path: Path) -> None:
    inner_phase(pair, 1)
    commit_hosted(pair, 1)
    folders = [tmp_path / str(i) for i in range(2)]
    for member, folder in zip(pair, folders, strict=True):
        member.write_checkpoint(folder / round_folder(1), 1)
    again = chain(stream, 2, WITH_SNAPSHOTS)
    for member, folder in zip(again, folders, strict=True):
        restored = member.restore(folder)
        assert restored is not None
        assert (restored.round_number, restored.embedding) == (1, None)
        assert parts.rounds_with(folder, member.stages, embedding=False) == (1,)
    assert_same_bits(state(again), state(pair))
