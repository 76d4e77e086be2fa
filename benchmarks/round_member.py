"""One peer of the rounds that :mod:`benchmarks.rounds` measures: a process with hivemind, as a node has it.

It answers commands and ends with its input (benchmarks.processes).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import answer_commands, credentials_of
from node.core.model.shapes import parameter_shapes
from node.exchange.transport import Entry, RoundEnd, ServedStages, Transport, transport_in_use
from node.security.credentials import RunCredentials, folder_of
from node.security.identity import open_identity
from protocol.group.peers import PeerRecord
from protocol.reduction.parts import ReductionLayout
from protocol.spec.run import RunSpec
from protocol.trust.envelope import sign_descriptor
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    ExchangeGroup,
    MemberLine,
    PayloadDescriptor,
    PeerId,
    Role,
    StageRange,
)
from protocol.wire.records import descriptor_from_bytes, descriptor_to_bytes
from tests.support.reduction import payload_of

RUN = "rounds"
_KEEP_ROUNDS = 2
_RECORD_SECONDS = 60.0


class RoundMember:
    """A peer. It has one method for each command of the benchmark."""

    _transport: Transport

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._identity = open_identity(folder / "peer.key")
        self._payloads: dict[int, bytes] = {}
        self._reduced: RunSpec | None = None
        self._ends: list[RoundEnd] = []

    async def introduce(self) -> dict[str, Any]:
        """Answers the id of this peer."""
        return {"peer": self._identity.peer}

    async def start(
        self, address: str, initial_peers: Sequence[str], shown: Mapping[str, str]
    ) -> dict[str, Any]:
        """Join the DHT. Answers its addresses there, and the pid of its p2pd."""
        folder = folder_of(self._identity.path, RUN)
        credentials = RunCredentials(
            folder, RUN, "127.0.0.1:9", PeerId("coordinator"), None, credentials_of(shown)
        )
        credentials.save()
        entry = Entry(
            RUN,
            credentials.certificate_file,
            credentials.authority_file,
            tuple(initial_peers),
            listen_host=address,
        )

        async def enter() -> Entry:
            return entry

        self._transport = await transport_in_use().start(self._identity, enter)
        below = psutil.Process().children(recursive=True)
        p2pd = next(process.pid for process in below if process.name() == "p2pd")
        return {"addresses": self._transport.addresses, "p2pd": p2pd}

    async def host(
        self, peers: Sequence[PeerId], capacity: int, stages: int, reduced: str = ""
    ) -> dict[str, Any]:
        """`reduced`: the JSON of the specification of a run of one stage whose payloads are reduced."""
        await self._transport.admit(peers)
        self._reduced = RunSpec.from_json(reduced) if reduced else None
        capacities = dict.fromkeys(range(stages), capacity)
        folders = self._folder / "payloads", self._folder / "checkpoints"
        await self._transport.host_stages(ServedStages(capacities, *folders, _KEEP_ROUNDS, self._reduced))
        return {}

    async def propose(self, round_number: int, sizes: Sequence[int]) -> dict[str, Any]:
        """Make one payload for each stage. Answers their signed descriptors."""
        if self._reduced is None:
            self._payloads = {stage: os.urandom(nbytes) for stage, nbytes in enumerate(sizes)}
        else:
            layout = ReductionLayout(parameter_shapes(self._reduced, 0), self._reduced.outer)
            seed = int.from_bytes(hashlib.sha256(self._identity.peer.encode()).digest()[:4])
            self._payloads = {0: payload_of(layout, seed)}
        return {"descriptors": [self._describe(round_number, stage).hex() for stage in self._payloads]}

    async def exchange(
        self, groups: Sequence[Sequence[str]], lines: Sequence[Mapping[str, Any]], seconds: float
    ) -> dict[str, Any]:
        """One round of all stages at once. Answers when it began and ended, and how many payloads it has, or
        has the sum of.

        `groups` have a descriptor of each peer; `lines` are those of the peers, in the same order.
        """
        began = time.monotonic()
        told = [MemberLine(**line) for line in lines]
        held = await asyncio.gather(
            *(self._gather(stage, group, told, seconds) for stage, group in enumerate(groups))
        )
        ended = time.monotonic()
        for end in self._ends:
            await self._transport.end_round(end)
        self._ends.clear()
        return {"began": began, "ended": ended, "held": sum(held)}

    async def publish(self) -> dict[str, Any]:
        """Publish a record in the DHT, as a node does every 5 minutes."""
        capacity = Capacity(device="cpu", memory_bytes=1 << 30, threads=2)
        record = PeerRecord(
            self._identity.peer, PROTOCOL_VERSION, Role.STAGE, capacity, "127.0.0.1:4000", StageRange(0, 1)
        )
        await self._transport.publish(record, _RECORD_SECONDS)
        return {}

    async def close(self) -> None:
        if hasattr(self, "_transport"):
            await self._transport.close()

    async def _gather(
        self, stage: int, group: Sequence[str], lines: Sequence[MemberLine], seconds: float
    ) -> int:
        signed = [descriptor_from_bytes(bytes.fromhex(each)) for each in group]
        line_of = dict(zip((each.owner for each in signed), lines, strict=False))
        descriptors = tuple(sorted(signed, key=lambda each: each.owner))
        own = next(each for each in descriptors if each.owner == self._identity.peer)
        told = tuple(line_of[each.owner] for each in descriptors) if lines else ()
        gathered = await self._transport.exchange(
            self._payloads[stage],
            own,
            ExchangeGroup(f"group {own.round_number}", descriptors, lines=told),
            expected=len(descriptors),
            deadline=seconds,
        )
        if self._reduced is None:
            return len(gathered.held)
        # As if the coordinator had committed this result: what reducers hold back is kept.
        sha256 = None if gathered.claim is None else gathered.claim.sha256
        self._ends.append(RoundEnd(stage, own.round_number, sha256))
        return 0 if sha256 is None else len(descriptors)

    def _describe(self, round_number: int, stage: int) -> bytes:
        payload = self._payloads[stage]
        unsigned = PayloadDescriptor(
            run=RUN,
            stage=stage,
            round_number=round_number,
            owner=self._identity.peer,
            anchor_digest=hashlib.sha256(b"anchor").hexdigest(),
            codec="ef2bit-v1:4096/32",
            weight=1.0,
            nbytes=len(payload),
            sha256=hashlib.sha256(payload).hexdigest(),
        )
        return descriptor_to_bytes(sign_descriptor(unsigned, self._identity.sign))


async def _serve() -> None:
    member = RoundMember(Path(sys.argv[1]))
    await answer_commands(member)
    await member.close()


if __name__ == "__main__":
    asyncio.run(_serve())
