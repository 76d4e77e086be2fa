"""The arbiter of contested payloads in the hive host of the coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hivemind import DHT

from node.exchange.allow_list import AllowList
from node.exchange.arbiter import PayloadArbiter
from node.exchange.hive.payload_peer import PayloadPeer
from node.exchange.payload_calls import PayloadCalls
from protocol.spec.run import RunSpec
from protocol.types import PayloadDescriptor, PeerId, Verdict

T = TypeVar("T")


class HostedArbiter:
    """An arbiter on an event loop in a thread of its own. The host must not fork any more after this.

    An averager of each stage would serve the payloads too, and take a process with torch for each.
    """

    def __init__(self, dht: DHT, run: str, spec: RunSpec, folder: Path, seconds: float) -> None:
        self._allow_list = AllowList()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="arbiter", daemon=True).start()

        async def start() -> PayloadArbiter:
            p2p = await dht.replicate_p2p()

            async def serve(stage: int, *of_stage: Any) -> PayloadCalls:
                peer = PayloadPeer(p2p, run, stage, *of_stage)
                await peer.serve(self._allow_list)
                return peer.service

            return await PayloadArbiter.of_run(spec, folder, serve)

        self._arbiter = self._result(start(), seconds)

    def arbitrate(self, descriptor: PayloadDescriptor, donors: tuple[PeerId, ...], seconds: float) -> Verdict:
        """See :meth:`PayloadArbiter.arbitrate`."""
        return self._result(self._arbiter.arbitrate(descriptor, donors, seconds), None)

    def admit(self, peers: Collection[PeerId]) -> None:
        self._allow_list.admit(peers)

    def forget(self, before_round: int) -> None:
        self._arbiter.forget(before_round)

    def _result(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)
