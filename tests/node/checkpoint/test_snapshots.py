"""The snapshots of the embedding on a node's disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.checkpoint import parts, snapshots
from node.checkpoint.files import read_snapshot
from node.checkpoint.snapshot_codec import encode, snapshot, snapshot_digest, snapshot_header
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import HASH_BYTES, digest_of
from protocol.types import Part

SHAPE = (6, 3)


def some(seed: int) -> bytes:
    return encode(snapshot(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))))


def keep(folder: Path, round_number: int, data: bytes) -> snapshots.StoredSnapshot:
    digest = snapshot_digest(data, *SHAPE)
    path = snapshots.write(folder, round_number, digest, data)
    return snapshots.StoredSnapshot(round_number, digest, path)


def test_snapshots_are_found_again_by_round_with_their_digests(tmp_path: Path) -> None:
    assert snapshots.held(tmp_path) == {}
    kept = {each: keep(tmp_path, each, some(each)) for each in (1000000, 10, 5)}
    assert snapshots.held(tmp_path) == kept
    assert list(snapshots.held(tmp_path)) == [5, 10, 1000000]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    kept = keep(tmp_path, 5, some(1))
    assert encode(read_snapshot(kept.path, kept.digest, SHAPE)) == some(1)


def test_a_snapshot_replaces_that_of_its_round_and_no_other(tmp_path: Path) -> None:
    """A host whose TE was wrong writes the right one of the same round later."""
    other = keep(tmp_path, 10, some(10))
    keep(tmp_path, 5, some(1))
    right = keep(tmp_path, 5, some(2))
    assert snapshots.held(tmp_path) == {5: right, 10: other}


def test_a_verified_download_becomes_a_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "incoming"
    file.write_bytes(some(3))
    digest = snapshot_digest(some(3), *SHAPE)
    path = snapshots.adopt(tmp_path, 5, digest, file)
    assert not file.exists()
    assert snapshots.held(tmp_path) == {5: snapshots.StoredSnapshot(5, digest, path)}


def test_only_the_needed_snapshots_stay(tmp_path: Path) -> None:
    for each in (5, 10, 15):
        keep(tmp_path, each, some(each))
    snapshots.prune(tmp_path, (10, 15, 20))
    assert list(snapshots.held(tmp_path)) == [10, 15]


def test_files_of_a_crash_and_of_others_are_not_snapshots(tmp_path: Path) -> None:
    kept = keep(tmp_path, 5, some(1))
    for name in (".hetnode-partial", "round-000010", f"round-000010-{'g' * 64}", f"{kept.path.name}~"):
        (kept.path.parent / name).write_bytes(b"")
    assert snapshots.held(tmp_path) == {5: kept}


@pytest.mark.parametrize("damage", ["a bit", "a byte less", "no file", "another digest"])
def test_a_damaged_snapshot_is_refused(tmp_path: Path, damage: str) -> None:
    kept, digest = keep(tmp_path, 5, some(1)), snapshot_digest(some(1), *SHAPE)
    match damage:
        case "a bit":
            kept.path.write_bytes(bytes([some(1)[0] ^ 1]) + some(1)[1:])
        case "a byte less":
            kept.path.write_bytes(some(1)[:-1])
        case "no file":
            kept.path.unlink()
        case _:
            digest = snapshot_digest(some(2), *SHAPE)
    with pytest.raises(HetnodeError) as refused:
        read_snapshot(kept.path, digest, SHAPE)
    assert refused.value.code is ErrorCode.CHECKPOINT_CORRUPT


def test_a_donor_serves_a_snapshot_as_a_part_whose_chunks_have_its_digest(tmp_path: Path) -> None:
    kept = keep(tmp_path, 5, some(1))
    found = parts.find(tmp_path, 0, Part.SNAPSHOT, 5)
    assert found is not None
    assert b"".join(parts.pieces(found, range(found.nbytes), 7)) == some(1)
    hashes = parts.chunk_hashes(found)
    chunks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    assert digest_of(snapshot_header(*SHAPE), chunks) == kept.digest
    assert parts.find(tmp_path, 1, Part.SNAPSHOT, 5) is None
    assert parts.find(tmp_path, 0, Part.SNAPSHOT, 6) is None


def test_a_donor_does_not_serve_a_snapshot_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    keep(tmp_path, 5, some(1))
    found = parts.find(tmp_path, 0, Part.SNAPSHOT, 5)
    assert found is not None
    keep(tmp_path, 5, some(2))
    with pytest.raises(FileNotFoundError):
        b"".join(parts.pieces(found, range(found.nbytes), 7))
