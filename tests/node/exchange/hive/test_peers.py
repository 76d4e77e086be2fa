"""Exchanges that are not finished, checkpoints, and wrong clocks: real processes, on loopback."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from torch import Tensor

from node.checkpoint.download import CheckpointDownload
from node.core.model.init import initial_parameters
from node.security.identity import open_identity
from protocol.math.digest import header_of, size_of
from protocol.math.outer_step import anchor_digest
from protocol.types import Part, PeerId, StateRecord
from protocol.wire.records import descriptor_from_bytes, descriptor_to_bytes
from tests.support.hive_nodes import (
    PATIENT,
    RUN,
    SPEC,
    Node,
    canonical,
    certified,
    record_of,
    start_node,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUND = 20
TENSORS = {"emb": torch.randn(600_000), "layers.0.wq": torch.randn(2_000_000), "norm": torch.randn(64)}


@dataclass
class Swarm:
    """Alice and bob host stage 0, carol stage 1."""

    folder: Path
    bootstrap: Node
    nodes: dict[str, Node]

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.bootstrap.transport.addresses

    async def admit(self) -> None:
        peers = [node.identity.peer for node in self.nodes.values()]
        for node in self.nodes.values():
            await node.transport.admit(peers)

    def checkpoints(self, name: str) -> Path:
        return self.folder / name / "checkpoints"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder = tmp_path_factory.mktemp("swarm")
    bootstrap = await start_node(folder, "bootstrap", ())
    swarm = Swarm(folder, bootstrap, {})
    try:
        stages = {"alice": (0,), "bob": (0,), "carol": (1,)}
        starting = (start_node(folder, name, stages[name], swarm.addresses) for name in stages)
        swarm.nodes.update(zip(stages, await asyncio.gather(*starting), strict=True))
        await swarm.admit()
        yield swarm
    finally:
        for node in (*swarm.nodes.values(), swarm.bootstrap):
            await node.transport.close()


async def exchange(swarm: Swarm, *names: str, round_number: int) -> None:
    """They gather each other's payloads."""
    nodes = [swarm[name] for name in names]
    payloads = [os.urandom(300_000) for _ in nodes]
    descriptors = [
        node.descriptor(payload, 0, round_number) for node, payload in zip(nodes, payloads, strict=True)
    ]
    held = await asyncio.gather(
        *(
            node.exchange(payload, own, descriptors)
            for node, payload, own in zip(nodes, payloads, descriptors, strict=True)
        )
    )
    assert held == [canonical(descriptors)] * len(nodes)


async def test_an_unfinished_exchange_ends_when_the_next_round_begins(swarm: Swarm) -> None:
    alice, bob = swarm["alice"], swarm["bob"]
    missing = bob.descriptor(b"never offered", 0, 4)
    own = alice.descriptor(b"payload", 0, 4)
    waiting = asyncio.create_task(alice.exchange(b"payload", own, [own, missing], deadline=600.0))
    assert await bob.fetch(own, alice) == b"payload"  # so it has begun
    async with asyncio.timeout(PATIENT):
        await exchange(swarm, "alice", "bob", round_number=5)
        assert await waiting == (own,)


# Checkpoints


@pytest.fixture
def checkpoint(swarm: Swarm) -> Mapping[str, Tensor]:
    for name in ("alice", "bob"):
        write(swarm.checkpoints(name), "stage-00.safetensors", TENSORS)
    write(swarm.checkpoints("carol"), "embedding.safetensors", {"emb": TENSORS["emb"]})
    return TENSORS


def write(checkpoints: Path, file: str, tensors: Mapping[str, Tensor]) -> Path:
    path = checkpoints / f"round-{ROUND:06d}" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path)
    return path


async def fetch_state(
    node: Node,
    tensors: Mapping[str, Tensor],
    into: Path,
    donors: Mapping[Node, int],
    part: Part = Part.STAGE,
    deadline: float = PATIENT,
    round_number: int = ROUND,
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    hosts = {donor.identity.peer: stage for donor, stage in donors.items()}
    record = StateRecord(RUN, 0, part, round_number, anchor_digest(tensors), tuple(hosts))
    download = CheckpointDownload(record, hosts, size_of(shapes), header_of(shapes), into)
    await node.transport.fetch_checkpoint(download, deadline)


def content(tensors: Mapping[str, Tensor]) -> bytes:
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))


async def test_the_anchor_before_round_1_is_fetched_from_a_host(swarm: Swarm, tmp_path: Path) -> None:
    initial, into = initial_parameters(SPEC, 0), tmp_path / "stage"
    await fetch_state(swarm["carol"], initial, into, {swarm["alice"]: 0}, round_number=0)
    assert into.read_bytes() == content(initial)


@pytest.mark.parametrize("donor", ["alice", "carol"])
async def test_the_embedding_is_fetched_from_its_host_or_its_follower(
    swarm: Swarm, checkpoint: Mapping[str, Tensor], tmp_path: Path, donor: str
) -> None:
    embedding = {"emb": checkpoint["emb"]}
    into = tmp_path / "embedding"
    stage = {"alice": 0, "carol": 1}[donor]
    await fetch_state(swarm["bob"], embedding, into, {swarm[donor]: stage}, Part.EMBEDDING)
    assert into.read_bytes() == content(embedding)


# Clocks


@pytest.mark.parametrize(
    ("skew", "step"),
    [
        (-600.0, 600.0),
        (600.0, -600.0),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((-600.0, 0.0), (-600.0, -600.0), (600.0, 0.0), (600.0, 600.0))
        ),
    ],
)
async def test_a_node_with_a_known_clock_error_of_ten_minutes_takes_part_also_when_its_clock_is_set(
    swarm: Swarm, tmp_path: Path, skew: float, step: float
) -> None:
    alice = swarm["alice"]
    await alice.transport.publish(record_of(alice.identity), ttl=60.0)
    async with skewed(swarm, tmp_path, skew, offset=-skew) as (identity, process):
        await alice.transport.admit([alice.identity.peer, identity])
        assert await line_of(process) == "True"
        (tmp_path / "step").write_text(str(step))
        theirs = descriptor_from_bytes(bytes.fromhex(await line_of(process)))
        payload = os.urandom(100_000)
        own = alice.descriptor(payload, 0, 1)
        tell(process, descriptor_to_bytes(own).hex())
        assert await alice.exchange(payload, own, [own, theirs]) == canonical([own, theirs])
        assert await line_of(process) == "2"
        assert await line_of(process) == "True"
        assert identity in await alice.transport.lookup()
        tell(process, "the end")
    await swarm.admit()


async def test_a_node_with_an_unknown_clock_error_is_refused(swarm: Swarm, tmp_path: Path) -> None:
    async with skewed(swarm, tmp_path, 600.0, offset=0.0) as (_, process):
        assert await line_of(process) == "dht-unreachable"


@asynccontextmanager
async def skewed(
    swarm: Swarm, folder: Path, skew: float, offset: float
) -> AsyncIterator[tuple[PeerId, asyncio.subprocess.Process]]:
    """A node in processes whose clocks are `skew` seconds ahead, and as many more as the file "step" says."""
    clock = f"""import os, time
real, file = time.time, {str(folder / "step")!r}
step = lambda: float(open(file).read() or 0) if os.path.exists(file) else 0.0
time.time = lambda: real() + {skew} + step()
"""
    (folder / "sitecustomize.py").write_text(clock)
    identity = open_identity(folder / "skewed.key")
    shown = certified(identity)
    os.close(identity.lock)  # the node itself holds it
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.hive_skewed", str(folder)),
        *(str(shown["certificate"]), str(shown["authority"]), str(offset)),
        *(swarm["alice"].identity.peer, swarm.addresses[0]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        yield identity.peer, process
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


def tell(process: asyncio.subprocess.Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(2 * PATIENT):
        return (await process.stdout.readline()).decode().strip()
