"""Parts of anchors in a store: what one member uploads, another downloads, though no peer sends a byte."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ops.objects.s3_store import S3Store
from node.checkpoint.download import CheckpointDownload
from node.checkpoint.parts import StoredPart, chunk_hashes
from node.checkpoint.transfer import CheckpointServer
from node.exchange.object_client import ObjectClient
from node.exchange.object_parts import segment_of, segments
from node.exchange.object_source import LentPart
from node.exchange.payload_service import PayloadService
from node.exchange.payload_store import PayloadStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import HASH_BYTES, chunk_count, digest_of
from protocol.types import Part, PeerId, StateRecord
from protocol.wire.object_calls import SEGMENT_BYTES
from tests.support.object_store import LOCATION, object_store, wrong_store

HERE = 2


class Away:
    """Peers without any uplink."""

    async def ask(self, *_: object) -> Any:
        raise ConnectionError("away")


def service_in(folder: Path) -> PayloadService:
    store = PayloadStore(folder / "payloads", 2)
    calls: Any = Away()
    return PayloadService(PeerId("me"), 0, 100, store, CheckpointServer(folder / "checkpoints"), calls)


async def test_a_part_is_downloaded_from_the_store_alone(tmp_path: Path) -> None:
    data = os.urandom(SEGMENT_BYTES + 5_000_000)
    (tmp_path / "file").write_bytes(b"header" + data)
    status = (tmp_path / "file").stat()
    part = StoredPart(tmp_path / "file", 6, len(data), (status.st_ino, status.st_mtime_ns))
    hashes = chunk_hashes(part)
    chunks = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    record = StateRecord("run", 0, Part.STAGE, 10, digest_of("{}", chunks), ())
    into = tmp_path / "into" / "part"
    download = CheckpointDownload(record, {PeerId("home"): 0}, len(data), "{}", into)
    client, keys = ObjectClient(), []
    with object_store():
        store = S3Store.at(LOCATION, 600)
        for number, each in enumerate(segments(part.nbytes)):
            segment = segment_of(part, hashes, each)
            sha256 = hashlib.sha256(segment).hexdigest()
            keys.append(f"run/{number}")
            await client.put(store.signed_put(keys[-1], len(segment), sha256), segment, sha256, HERE)
        lent = LentPart(tuple(map(store.signed_get, keys)), HERE)
        assert len(lent.urls) == 2
        await service_in(tmp_path).fetch_checkpoint(download, 60.0, lent)
    assert into.read_bytes() == data


@pytest.mark.parametrize("kind", ["lying", "empty"])
async def test_a_store_without_the_right_bytes_is_a_donor_that_fails(tmp_path: Path, kind: str) -> None:
    record = StateRecord("run", 0, Part.STAGE, 10, "0" * 64, ())
    download = CheckpointDownload(record, {}, 100, "{}", tmp_path / "part")
    async with wrong_store(kind, HASH_BYTES) as (endpoint, _):
        with pytest.raises(HetnodeError) as error:
            await service_in(tmp_path).fetch_checkpoint(download, 60.0, LentPart((endpoint,), HERE))
    assert error.value.code is ErrorCode.STATE_UNAVAILABLE
    assert "the object store" in error.value.cause


@given(st.integers(1, 1 << 40))
def test_segments_tile_a_part_and_its_hashes(nbytes: int) -> None:
    nbytes = nbytes % (10 * SEGMENT_BYTES) + 1
    found = list(segments(nbytes))
    assert [each.start for each in found] == [SEGMENT_BYTES * at for at in range(len(found))]
    assert sum(map(len, found)) == nbytes + HASH_BYTES * chunk_count(nbytes)
    assert all(0 < len(each) <= SEGMENT_BYTES for each in found)
