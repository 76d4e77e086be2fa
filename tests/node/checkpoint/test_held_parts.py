"""A download outlasts the checkpoint: a donor goes on with what it has begun to send."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from node.checkpoint.transfer import CheckpointServer
from protocol.types import Part
from tests.support.checkpoints import write_checkpoint


async def content(server: CheckpointServer, index: int) -> bytes | None:
    found = await server.find(1, Part.STAGE, 10)
    return None if found is None else b"".join([piece async for piece in server.pieces(found, index)])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot open a removed file again")
async def test_what_a_peer_fetches_is_sent_after_its_checkpoint_was_removed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 10)
    server, other = CheckpointServer(tmp_path), CheckpointServer(tmp_path)
    before = [await content(server, index) for index in (0, 1)]
    assert None not in before
    shutil.rmtree(folder)
    assert [await content(server, index) for index in (0, 1)] == before
    assert await content(other, 0) is None  # nobody has asked it


async def test_a_checkpoint_that_was_written_again_is_sent_as_it_is_now(tmp_path: Path) -> None:
    server = CheckpointServer(tmp_path)
    write_checkpoint(tmp_path, 10)
    before = await content(server, 1)
    other = write_checkpoint(tmp_path / "other", 20)
    shutil.rmtree(tmp_path / "round-000010")
    other.rename(tmp_path / "round-000010")
    after = await content(server, 1)
    assert after is not None
    assert after != before
