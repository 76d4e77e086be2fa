"""Members that come back or join late: they hold the same state as those that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.data.stream import SampleStream
from node.ipc.worker_calls import (
    Abort,
    Build,
    CommitEmbedding,
    Connect,
    Digests,
    LoadInitial,
    LoadPart,
    ResetError,
    Restore,
    RestoredCheckpoint,
    WriteCheckpoint,
)
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Part, StageRange
from tests.support.hand_driven_replica import (
    SPEC,
    assert_same_bits,
    chain,
    commit,
    data_of,
    inner_phase,
    proposals,
    state,
)
from tests.support.running_replica import ThreadWorker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("members", [1, 2])
def test_a_replica_that_follows_two_rounds_and_then_joins_holds_the_same_anchors(
    stream: SampleStream, members: int
) -> None:
    leader, follower = chain(stream, 1), chain(stream, members)
    for round_number in (1, 2):
        inner_phase(leader, round_number)
        payloads = {stage: [payload] for stage, payload in proposals(leader).items()}
        assert commit(leader, round_number, payloads, True) == commit(follower, round_number, payloads, False)
    for index, replica in enumerate((leader, follower)):
        inner_phase(replica, 3, index)
    both = [proposals(leader), proposals(follower)]
    payloads = {stage: [each[stage] for each in both] for stage in range(SPEC.swarm.stages)}
    assert commit(leader, 3, payloads, True) == commit(follower, 3, payloads, True)
    assert [member.outer.rounds for member in follower] == [
        dict.fromkeys(member.stages, 3) for member in follower
    ]
    assert {member.outer.embedding_round for member in follower} == {3}


@pytest.mark.parametrize("members", [1, 2])
def test_a_restored_replica_continues_bit_for_bit_as_if_it_had_not_stopped(
    stream: SampleStream, tmp_path: Path, members: int
) -> None:
    other, running = chain(stream, 1), chain(stream, members)
    for round_number in (1, 2):
        for index, replica in enumerate((other, running)):
            inner_phase(replica, round_number, index)
        sent = [proposals(other), proposals(running)]
        # The second round has no payload of this replica, so it keeps progress that is not sent.
        payloads = {stage: [each[stage] for each in sent[: 3 - round_number]] for stage in sent[0]}
        commit(other, round_number, payloads, True)
        commit(running, round_number, payloads, round_number == 1)
    folders = [tmp_path / str(i) / "round-000002" for i in range(members)]
    for member, folder in zip(running, folders, strict=True):
        member.write_checkpoint(folder, 2)
    returned = chain(stream, members)
    for member, folder in zip(returned, folders, strict=True):
        restored = member.restore(folder.parent)
        assert restored is not None
        assert restored.private is not None
    assert_same_bits(state(returned), state(running))
    for replica in (running, returned):
        inner_phase(replica, 3)
    sent = [proposals(running), proposals(returned)]
    assert sent[0] == sent[1]
    payloads = {stage: [payload] for stage, payload in sent[0].items()}
    assert commit(running, 3, payloads, True) == commit(returned, 3, payloads, True)
    assert_same_bits(state(returned), state(running))


def test_a_late_member_loads_the_parts_of_others_and_follows_from_there(
    stream: SampleStream, tmp_path: Path
) -> None:
    donors = chain(stream, 2)
    inner_phase(donors, 1)
    payloads = {stage: [payload] for stage, payload in proposals(donors).items()}
    digests = commit(donors, 1, payloads, True)
    for i, donor in enumerate(donors):
        donor.write_checkpoint(tmp_path / str(i) / "round-000001", 1)
    files = {
        (stage, Part.STAGE): tmp_path / str(stage) / "round-000001" / f"stage-0{stage}.safetensors"
        for stage in (0, 1)
    }
    files[0, Part.EMBEDDING] = tmp_path / "1" / "round-000001" / "embedding.safetensors"
    raw = {key: data_of(path, tmp_path / f"{key[1]}-{key[0]}") for key, path in files.items()}
    late = chain(stream, 2)
    inner_phase(late, 1)  # it discards what it learned from the wrong parameters
    found = [late[stage].load_part(stage, Part.STAGE, 1, raw[stage, Part.STAGE]) for stage in (0, 1)]
    found.append(late[1].load_part(0, Part.EMBEDDING, 1, raw[0, Part.EMBEDDING]))
    assert found == digests
    expected = {name: value for name, value in state(donors).items() if not name.startswith("error")}
    assert_same_bits({n: v for n, v in state(late).items() if not n.startswith("error")}, expected)
    assert not any(value.any() for name, value in state(late).items() if name.startswith("error"))
    for replica in (donors, late):
        inner_phase(replica, 2)
    for stage, donor, latecomer in zip((0, 1), donors, late, strict=True):
        # Cold moments: the first steps are short, and shorter than those of a member with moments.
        moved = [
            sum(
                float((member.outer[stage].anchor[name] - parameter.detach()).abs().sum())
                for name, parameter in member.modules[stage].canonical_parameters().items()
            )
            for member in (donor, latecomer)
        ]
        assert 0 < moved[1] < 0.8 * moved[0]
    sent = [proposals(donors), proposals(late)]
    payloads = {stage: [each[stage] for each in sent] for stage in (0, 1)}
    assert commit(donors, 2, payloads, True) == commit(late, 2, payloads, True)


@pytest.mark.parametrize("damage", ["short", "missing"])
def test_a_part_that_cannot_be_read_changes_nothing(
    stream: SampleStream, tmp_path: Path, damage: str
) -> None:
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    before = state([member])
    if damage == "short":
        (tmp_path / "part").write_bytes(b"\0" * 100)
    with pytest.raises(HetnodeError) as caught:
        member.load_part(0, Part.STAGE, 5, tmp_path / "part")
    assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert_same_bits(state([member]), before)
    assert member.outer.rounds == {0: 0, 1: 0}


def test_the_initial_parameters_can_be_loaded_again(stream: SampleStream) -> None:
    member, fresh = chain(stream, 2)[1], chain(stream, 2)[1]
    other = chain(stream, 2)
    inner_phase(other, 1)
    commit([other[0], member], 1, {stage: [data] for stage, data in proposals(other).items()}, False)
    member.load_initial()
    assert_same_bits(state([member]), state([fresh]))
    assert member.outer.embedding_digest() == fresh.outer.embedding_digest()
    assert (member.outer.rounds, member.outer.embedding_round) == ({1: 0}, 0)


async def test_the_recovery_calls_of_the_worker(tmp_path: Path) -> None:
    worker = ThreadWorker().client
    built = await worker.call(Build(SPEC, StageRange(1, 2)))
    assert list(built.parts) == [(1, Part.STAGE), (0, Part.EMBEDDING)]
    for k_upstream in (8, 4):
        await worker.call(Connect(k_upstream, None))
    at_start = await worker.call(Digests())
    assert [(part, round_number) for part, (round_number, _) in at_start.items()] == [
        ((1, Part.STAGE), 0),
        ((0, Part.EMBEDDING), 0),
    ]
    assert await worker.call(Restore(tmp_path)) is None
    await worker.call(Abort(1, 1))
    await worker.call(CommitEmbedding(1, (), ()))
    written = tmp_path / "round-000001"
    await worker.call(WriteCheckpoint(written, 1))
    assert (written / "stage-01.safetensors").stat().st_size > built.parts[1, Part.STAGE].nbytes
    await worker.call(LoadInitial())
    assert await worker.call(Digests()) == at_start
    assert await worker.call(Restore(tmp_path)) == RestoredCheckpoint(1, has_private_state=True)
    (_, stage_digest), (_, embedding_digest) = at_start.values()
    assert (await worker.call(Digests()))[1, Part.STAGE] == (1, stage_digest)
    file = data_of(written / "embedding.safetensors", tmp_path / "part")
    assert file.stat().st_size == built.parts[0, Part.EMBEDDING].nbytes
    assert await worker.call(LoadPart(0, Part.EMBEDDING, 4, file)) == embedding_digest
    assert (await worker.call(Digests()))[0, Part.EMBEDDING] == (4, embedding_digest)
    await worker.call(ResetError(1))
