"""Nodes with the real transport: hivemind's processes and libp2p's daemon, on loopback."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from coordinator.authority import Authority
from node.exchange.hive.transport import HiveTransport, start
from node.exchange.transport import Entry, ServedStages
from node.security.identity import Identity, open_identity
from protocol.group.peers import PeerRecord
from protocol.server.line import UNLIMITED, Line
from protocol.spec.run import RunSpec
from protocol.trust.envelope import sign_descriptor
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    ExchangeGroup,
    ManifestEntry,
    PayloadDescriptor,
    PeerId,
    Role,
    StageRange,
)
from tests.builders import spec_of
from tests.support import commands
from tests.support.certificates import enrolled
from tests.support.waiting import is_alive, until

RUN = "test-run"
SPEC = spec_of()
CAPACITY = 600_000
KEEP_ROUNDS = 4
REFUSED = Path("/dev/null/payloads")
"""A folder that cannot be made, not even by root."""
PATIENT = 30.0
"""Deadline of a call that must succeed."""
UNHURRIED = 120.0
"""Deadline of a search that must find every peer, on a loaded machine, too."""
BRIEF = 2.0
"""Deadline of a call that must reach its deadline."""


@dataclass(frozen=True)
class Node:
    """A peer with the real transport."""

    identity: Identity
    transport: HiveTransport

    @property
    def processes(self) -> list[psutil.Process]:
        """The hivemind host, and after it all processes below it."""
        host = psutil.Process(self.transport.pid)
        return [host, *host.children(recursive=True)]

    def descriptor(self, payload: bytes, stage: int, round_number: int) -> PayloadDescriptor:
        return describe(self.identity, payload, stage, round_number)

    async def exchange(
        self,
        payload: bytes,
        descriptor: PayloadDescriptor,
        group: Sequence[PayloadDescriptor] | None,
        deadline: float = PATIENT,
        expected: int = 0,
    ) -> tuple[PayloadDescriptor, ...]:
        gathered = await self.transport.exchange(
            payload,
            descriptor,
            None if group is None else ExchangeGroup("group", tuple(canonical(group))),
            expected=expected,
            deadline=deadline,
        )
        return gathered.held

    async def fetch(self, descriptor: PayloadDescriptor, *holders: Node, deadline: float = PATIENT) -> bytes:
        entry = ManifestEntry(descriptor, tuple(holder.identity.peer for holder in holders))
        return (await self.transport.fetch_payload(entry, deadline)).read(descriptor.nbytes)


def describe(identity: Identity, payload: bytes, stage: int, round_number: int) -> PayloadDescriptor:
    unsigned = PayloadDescriptor(
        run=RUN,
        stage=stage,
        round_number=round_number,
        owner=identity.peer,
        anchor_digest="anchor",
        codec="test",
        weight=1.0,
        nbytes=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
    )
    return sign_descriptor(unsigned, identity.sign)


def canonical(descriptors: Sequence[PayloadDescriptor]) -> tuple[PayloadDescriptor, ...]:
    return tuple(sorted(descriptors, key=lambda descriptor: descriptor.owner))


def record_of(identity: Identity, endpoint: str = "127.0.0.1:4000") -> PeerRecord:
    capacity = Capacity(device="cpu", memory_bytes=1 << 30, threads=2)
    return PeerRecord(identity.peer, PROTOCOL_VERSION, Role.STAGE, capacity, endpoint, StageRange(0, 2))


async def start_node(
    folder: Path,
    name: str,
    stages: Sequence[int],
    initial_peers: Sequence[str] = (),
    client_mode: bool = False,
    allow_list: Sequence[PeerId] = (),
    payloads: Path | None = None,
) -> Node:
    """Its checkpoints are in `folder`, under its name; so are its payloads, unless told otherwise."""
    return await start_as(
        open_identity(folder / f"{name}.key"),
        folder / name,
        stages,
        initial_peers,
        client_mode,
        allow_list,
        payloads,
    )


async def start_as(
    identity: Identity,
    folder: Path,
    stages: Sequence[int],
    initial_peers: Sequence[str] = (),
    client_mode: bool = False,
    allow_list: Sequence[PeerId] = (),
    payloads: Path | None = None,
    listen_port: int = 0,
    line: Line = UNLIMITED,
    spec: RunSpec | None = None,
) -> Node:
    entry = entry_of(identity, initial_peers=initial_peers, client_mode=client_mode, listen_port=listen_port)
    transport = await start_transport(identity, entry, line)
    if stages:
        await transport.admit(allow_list)
        hosted = hosted_in(folder, dict.fromkeys(stages, CAPACITY))
        await transport.host_stages(
            replace(hosted, payload_folder=payloads or hosted.payload_folder, spec=spec or hosted.spec)
        )
    return Node(identity, transport)


def entry_of(identity: Identity, **changes: Any) -> Entry:
    """How a peer of these tests enters, with a certificate of its own unless it is given."""
    shown = {} if "certificate" in changes else certified(identity)
    if "initial_peers" in changes:
        changes["initial_peers"] = tuple(changes["initial_peers"])
    return Entry(**{"run": RUN, **shown, **changes})


async def start_transport(identity: Identity, entry: Entry, line: Line = UNLIMITED) -> HiveTransport:
    """A transport whose processes enter with `entry`, however often they start."""
    commands.template()  # the one of all tests; else the first node here would start a smaller one

    async def enter() -> Entry:
        return entry

    return await start(identity, enter, line)


def hosted_in(folder: Path, capacities: Mapping[int, int]) -> ServedStages:
    """Stages of the run SPEC, whose payloads and checkpoints are in `folder`."""
    return ServedStages(capacities, folder / "payloads", folder / "checkpoints", KEEP_ROUNDS, spec=SPEC)


def certified(identity: Identity, issuer: Authority | None = None) -> dict[str, Path]:
    """The fields of an Entry that make the peer believed."""
    credentials = enrolled(identity, RUN, issuer=issuer)
    return {"certificate": credentials.certificate_file, "authority": credentials.authority_file}


async def gone(processes: Sequence[psutil.Process]) -> None:
    """Return once all `processes` have ended; AssertionError if they do not."""
    await until(lambda: not any(map(is_alive, processes)), 10, f"the end of {processes}")
