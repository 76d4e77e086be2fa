"""Where a member gets its anchors: its own checkpoint, another peer's, or the parameters before round 1."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from node.ipc.worker_calls import LoadInitial, LoadPart, ResetError, Restore
from node.monitoring.figures import Wait
from node.train.outer_exchange import OuterExchange
from node.train.services import Services
from node.transport.transport import CheckpointDownload
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Part, StateRecord

log = logging.getLogger(__name__)

_DOWNLOAD_SECONDS = 3600.0
_UNAVAILABLE = (ErrorCode.STATE_UNAVAILABLE, ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.UNKNOWN_PEER)


class Recovery:
    """Loads anchors into the worker. From these on, :class:`OuterExchange` follows the log of decisions.

    Args:
        folder: of this node's own checkpoints; downloads are in ``folder/incoming`` until they are loaded.
    """

    def __init__(self, services: Services, exchange: OuterExchange, folder: Path) -> None:
        self._exchange, self._folder = exchange, folder
        self._recovery, self._peer = services.spec.recovery, services.identity.peer
        self._worker, self._transport = services.worker, services.transport
        self._coordinator, self._membership = services.coordinator, services.membership
        self._waits = services.figures.waits
        self._tried_round = 0  # of the own checkpoint that replace_anchors has loaded before

    async def load_at_start(self) -> None:
        """Load this node's newest checkpoint, or another peer's where that saves many rounds."""
        restored = await self._worker.call(Restore(self._folder))
        await self._exchange.refresh()
        if restored is not None:
            kept = f"{'with' if restored.has_private_state else 'without'} its own progress"
            log.info("this node's checkpoint of round %d is loaded, %s", restored.round_number, kept)
        if self._exchange.position >= max(1, self._membership.run_view.round_number):
            log.warning("this node's checkpoint is ahead of the run: starting from the parameters before it")
            await self._worker.call(LoadInitial())
            await self._exchange.refresh()
        every, keep = self._recovery.checkpoint_every, self._recovery.keep_rounds
        await self.catch_up(every if restored is None else keep)

    async def catch_up(self, most: int | None = None) -> None:
        """Jump forward where more than `most` rounds (by default: all that peers keep) must be replayed.

        Replaying keeps this node's own progress, jumping drops it.
        """
        keep = self._recovery.keep_rounds - 2  # others drop old rounds while this node replays
        tip = await self._membership.until(lambda run_view: run_view.round_number or None) - 1
        if tip - self._exchange.position > min(most or keep, keep):
            try:
                await self.jump_forward()
            except HetnodeError as error:
                if error.code not in _UNAVAILABLE:
                    raise
                log.warning("following the rounds from %d on: %s", self._exchange.position, error)

    async def jump_forward(self) -> bool:
        """Load the newest checkpoints of other peers that are ahead of the anchors here.

        Returns whether there was any. Raises HetnodeError: STATE_UNAVAILABLE where no peer can give one.
        """
        ahead = []
        for stage, part in self._exchange.parts:
            records = await self._coordinator.locate(stage, part)
            here = self._exchange.round_of(stage, part)
            if newer := [record for record in records if record.round_number > here]:
                ahead.append(newer)
        if ahead:
            await self._load_all(ahead)
        return bool(ahead)

    async def replace_anchors(self) -> None:
        """Drop the anchors here, which differ from those of the other replicas, and load right ones.

        They come from other peers where these keep a checkpoint; else from this node's own checkpoint; else,
        or where that has led to wrong anchors before, they are the parameters before round 1. The progress
        since the last round is lost.
        """
        located = [await self._coordinator.locate(stage, part) for stage, part in self._exchange.parts]
        others = [[record for record in records if set(record.holders) - {self._peer}] for records in located]
        if all(others):
            await self._load_all(others)
            return
        restored = await self._worker.call(Restore(self._folder))
        if restored is None or restored.round_number == self._tried_round:
            await self._worker.call(LoadInitial())
        self._tried_round = 0 if restored is None else restored.round_number
        for stage, part in self._exchange.parts:
            if part is Part.STAGE:
                await self._worker.call(ResetError(stage))
        await self._exchange.refresh()

    async def _load_all(self, wanted: list[list[StateRecord]]) -> None:
        """Load the newest available checkpoint of each part. Raises the first error, after all have ended."""
        results = await asyncio.gather(*map(self._load_newest, wanted), return_exceptions=True)
        await self._exchange.refresh()
        for result in results:
            if result is not None:
                raise result

    async def _load_newest(self, records: list[StateRecord]) -> None:
        for record in records:
            try:
                await self._load(record)
                break
            except HetnodeError as error:
                if error.code is not ErrorCode.STATE_UNAVAILABLE or record is records[-1]:
                    raise
                log.warning("trying the checkpoint before: %s", error)

    async def _load(self, record: StateRecord) -> None:
        hosts = self._membership.run_view.hosts()
        holders = set(record.holders) & hosts.keys() - {self._peer}
        donors = {peer: hosts[peer].first for peer in holders}
        info = self._exchange.stage_info.parts[record.stage, record.part]
        folder = self._folder / "incoming"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{record.part.value}-{record.stage:02d}-{record.round_number:06d}"
        log.info(
            "loading %s %d of round %d (%d bytes) from %d peers",
            *(record.part.value, record.stage, record.round_number, info.nbytes, len(donors)),
        )
        download = CheckpointDownload(record, donors, info.nbytes, info.header, file)
        with self._waits.on(Wait.CHECKPOINT):
            await self._transport.fetch_checkpoint(download, _DOWNLOAD_SECONDS)
        await self._worker.call(LoadPart(record.stage, record.part, record.round_number, file))
        for leftover in folder.glob(f"{file.name}*"):
            leftover.unlink()
