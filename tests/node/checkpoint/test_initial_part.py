"""What a donor hands on of the anchors before round 1, which no checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.checkpoint.initial import InitialAnchors
from node.checkpoint.transfer import CheckpointServer
from node.core.model.init import initial_parameters
from protocol.math.digest import HASH_BYTES, digest_of, header_of
from protocol.math.outer_optimizer import initial_state
from protocol.math.outer_step import anchor_digest
from protocol.types import Part
from tests.builders import spec_of


async def bytes_of(server: CheckpointServer, stage: int, part: Part, index: int) -> bytes:
    found = await server.find(stage, part, 0)
    assert found is not None
    return b"".join([piece async for piece in server.pieces(found, index)])


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
async def test_the_initial_parameters_are_served_with_the_digest_that_members_attest(
    tmp_path: Path, optimizer: str
) -> None:
    spec = spec_of(outer__optimizer=optimizer)
    server = CheckpointServer(tmp_path, InitialAnchors(spec, None, (1,)))
    parameters = initial_parameters(spec, 1)
    committed = parameters | initial_state(parameters, spec.outer.slots)
    hashes = await bytes_of(server, 1, Part.STAGE, 0)
    chunks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    header = header_of({name: tuple(tensor.shape) for name, tensor in committed.items()})
    assert digest_of(header, chunks) == anchor_digest(committed)
    content = await bytes_of(server, 1, Part.STAGE, 1)
    assert content == b"".join(committed[name].numpy().tobytes() for name in sorted(committed))


async def test_the_initial_embedding_is_a_part_of_stage_0(tmp_path: Path) -> None:
    spec = spec_of()
    server = CheckpointServer(tmp_path, InitialAnchors(spec, None, (0, 1)))
    content = await bytes_of(server, 0, Part.EMBEDDING, 1)
    assert content == initial_parameters(spec, 0)["emb"].numpy().tobytes()


async def test_a_peer_makes_no_stage_that_it_does_not_host(tmp_path: Path) -> None:
    server = CheckpointServer(tmp_path, InitialAnchors(spec_of(), None, (1,)))
    assert await server.find(0, Part.STAGE, 0) is None
    assert await server.find(0, Part.EMBEDDING, 0) is None
    assert await server.find(1, Part.SNAPSHOT, 0) is None
    assert not list(tmp_path.iterdir())
