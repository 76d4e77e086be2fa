"""The arbiter of contested payloads in the hive host of the coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hivemind import DHT
from hivemind.p2p import P2P

from node.hive.payload_peer import PayloadPeer
from node.hive.stream_calls import Guard, GuardedStreams
from node.model.payloads import longest_nbytes, payload_layout
from node.transport.allow_list import AllowList
from node.transport.arbiter import KEEP_ROUNDS, Arbiter, StagePayloads
from node.transport.checkpoint_transfer import CheckpointServer
from node.transport.payload_store import PayloadStore
from protocol.spec.run import RunSpec
from protocol.types import PayloadDescriptor, PeerId, Verdict

T = TypeVar("T")


async def serve_arbiter(
    p2p: P2P, run: str, spec: RunSpec, folder: Path, allow_list: AllowList, guard: Guard = GuardedStreams
) -> Arbiter:
    """An arbiter that fetches through `p2p`, and serves the peers of the allow list from now on.

    Args:
        folder: keeps the payloads, also over a restart. Created if necessary.
        guard: lets in the streams of other peers.
    """
    stages = {}
    for stage in range(spec.swarm.stages):
        store = PayloadStore(folder / f"stage-{stage:02d}", KEEP_ROUNDS)
        # It has no checkpoints: the folder stays empty.
        longest = longest_nbytes(spec, stage)
        peer = PayloadPeer(p2p, run, stage, longest, store, CheckpointServer(folder / "checkpoints"))
        await peer.serve(allow_list, guard)
        stages[stage] = StagePayloads(partial(payload_layout, spec, stage), store, peer)
    return Arbiter(stages)


class HostedArbiter:
    """An arbiter on an event loop in a thread of its own. The host must not fork any more after this.

    An averager of each stage would serve the payloads too, and take a process with torch for each.
    """

    def __init__(self, dht: DHT, run: str, spec: RunSpec, folder: Path, seconds: float) -> None:
        self._allow_list = AllowList()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="arbiter", daemon=True).start()

        async def start() -> Arbiter:
            return await serve_arbiter(await dht.replicate_p2p(), run, spec, folder, self._allow_list)

        self._arbiter = self._result(start(), seconds)

    def arbitrate(self, descriptor: PayloadDescriptor, donors: tuple[PeerId, ...], seconds: float) -> Verdict:
        """See :meth:`Arbiter.arbitrate`."""
        return self._result(self._arbiter.arbitrate(descriptor, donors, seconds), None)

    def admit(self, peers: Collection[PeerId]) -> None:
        self._allow_list.admit(peers)

    def forget(self, before_round: int) -> None:
        self._arbiter.forget(before_round)

    def _result(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)
