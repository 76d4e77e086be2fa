"""The limit of a node's line holds for payloads, checkpoints and links together, over real sockets."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from node.checkpoint.download import CheckpointDownload
from node.security.identity import open_identity
from protocol.math.digest import header_of, size_of
from protocol.math.outer_step import anchor_digest
from protocol.server.line import BURST_SECONDS, Line, LineLimits
from protocol.types import Part, StateRecord
from tests.support.hive_nodes import RUN, start_as, start_node

RATE = 1e6


async def test_a_donor_sends_no_faster_than_its_limit_whichever_process_sends(tmp_path: Path) -> None:
    line = Line.create(LineLimits(upload=RATE), tmp_path / "line")
    tensors = {"weight": torch.randn(300_000)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    file = tmp_path / "donor" / "checkpoints" / "round-000003" / "stage-00.safetensors"
    file.parent.mkdir(parents=True)
    save_file(tensors, file)
    donor = await start_as(open_identity(tmp_path / "donor.key"), tmp_path / "donor", (0, 1), line=line)
    try:
        asking = await start_node(tmp_path, "asking", (2,), donor.transport.addresses)
        try:
            for node in (donor, asking):
                await node.transport.admit([donor.identity.peer, asking.identity.peer])
            record = StateRecord(RUN, 0, Part.STAGE, 3, anchor_digest(tensors), (donor.identity.peer,))
            hosts = {donor.identity.peer: 0}
            into = tmp_path / "part"
            download = CheckpointDownload(record, hosts, size_of(shapes), header_of(shapes), into)
            own = 0
            began = time.monotonic()
            fetching = asyncio.create_task(asking.transport.fetch_checkpoint(download, 60))
            while not fetching.done():  # as the links of the main process do
                await line.up.take(50_000)
                own += 50_000
            await fetching
            seconds = time.monotonic() - began
        finally:
            await asking.transport.close()
    finally:
        await donor.transport.close()
    assert own
    total = into.stat().st_size + own
    assert total <= RATE * (seconds + BURST_SECONDS) + 2 * line.up.piece_bytes
