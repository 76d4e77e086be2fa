"""Where a member gets its anchors: its own checkpoint, another peer's, or the parameters before round 1."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from node.core.train.member_anchors import MemberAnchors
from node.core.train.services import Services
from node.ipc.worker_calls import LoadInitial, LoadPart, ResetError, Restore
from protocol.errors import ErrorCode, HetnodeError, first_error
from protocol.types import Part, StateRecord

log = logging.getLogger(__name__)

_UNAVAILABLE = (ErrorCode.STATE_UNAVAILABLE, ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.UNKNOWN_PEER)


class Recovery:
    """Loads anchors into the worker. From these on, :class:`MemberAnchors` follows the log of decisions.

    Args:
        folder: of this node's own checkpoints; downloads are in ``folder/incoming`` until they are loaded.
    """

    def __init__(self, services: Services, anchors: MemberAnchors, folder: Path) -> None:
        self._anchors, self._folder = anchors, folder
        self._recovery, self._peer = services.spec.recovery, services.identity.peer
        self._worker, self._transport = services.worker, services.transport
        self._coordinator, self._membership = services.coordinator, services.membership
        self._tried_round = 0  # of the own checkpoint that replace_anchors has loaded before

    async def load_at_start(self) -> None:
        """Load this node's newest checkpoint, or another peer's where that saves many rounds."""
        restored = await self._worker.call(Restore(self._folder))
        await self._anchors.refresh()
        if restored is not None:
            kept = f"{'with' if restored.has_private_state else 'without'} its own progress"
            log.info("this node's checkpoint of round %d is loaded, %s", restored.round_number, kept)
        every, keep = self._recovery.checkpoint_every, self._recovery.keep_rounds
        await self.catch_up(every if restored is None else keep)

    async def catch_up(self, most: int | None = None) -> None:
        """Jump forward where more than `most` rounds (by default: all that peers keep) must be replayed.

        Replaying keeps this node's own progress, jumping drops it.
        """
        keep = self._recovery.keep_rounds - 2  # others drop old rounds while this node replays
        tip = await self._membership.until(lambda run_view: run_view.round_number or None) - 1
        if tip - self._anchors.position > min(most or keep, keep):
            try:
                await self.jump_forward()
            except HetnodeError as error:
                if error.code not in _UNAVAILABLE:
                    raise
                log.warning("following the rounds from %d on: %s", self._anchors.position, error)

    async def roll_back(self) -> bool:
        """Load the anchors of the newest rollback, unless those here are later ones. Returns whether it did.

        The rounds before it need not be applied: what they have led to does not count any more.

        Raises HetnodeError: STATE_UNAVAILABLE where neither this node nor a peer that is here has them, and
        no peer has later ones.
        """
        rollback = self._membership.run_view.rollback
        if rollback is None or self._anchors.position >= rollback.round_number:
            return False
        try:
            await self._anchors.restore(rollback)
        except (HetnodeError, BaseExceptionGroup) as error:  # several parts may fail
            failure = first_error(error)
            if not isinstance(failure, HetnodeError) or failure.code is not ErrorCode.STATE_UNAVAILABLE:
                raise
            if not await self.jump_forward():
                raise
        return True

    async def jump_forward(self) -> bool:
        """Load the newest checkpoints of other peers that are ahead of the anchors here.

        Returns whether there was any. Raises HetnodeError: STATE_UNAVAILABLE where no peer can give one.
        """
        ahead = []
        for stage, part in self._anchors.parts:
            records = await self._coordinator.locate(stage, part)
            here = self._anchors.round_of(stage, part)
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
        located = [await self._coordinator.locate(stage, part) for stage, part in self._anchors.parts]
        # This node makes the anchors of round 0 itself.
        others = [
            [record for record in records if record.round_number and set(record.holders) - {self._peer}]
            for records in located
        ]
        if all(others):
            await self._load_all(others)
            return
        restored = await self._worker.call(Restore(self._folder))
        if restored is None or restored.round_number == self._tried_round:
            await self._worker.call(LoadInitial())
        self._tried_round = 0 if restored is None else restored.round_number
        for stage, part in self._anchors.parts:
            if part is Part.STAGE:
                await self._worker.call(ResetError(stage))
        await self._anchors.refresh()

    async def _load_all(self, wanted: list[list[StateRecord]]) -> None:
        """Load the newest checkpoint of each part, or one that has begun. Raises an error after all ended."""
        results = await asyncio.gather(*map(self._load_newest, wanted), return_exceptions=True)
        await self._anchors.refresh()
        for result in results:
            if result is not None:
                raise result

    async def _load_newest(self, records: list[StateRecord]) -> None:
        records.sort(key=self._anchors.files.has_begun, reverse=True)
        for record in records:
            try:
                await self._load(record)
                break
            except HetnodeError as error:
                if error.code is not ErrorCode.STATE_UNAVAILABLE or record is records[-1]:
                    raise
                log.warning("trying the checkpoint before: %s", error)

    async def _load(self, record: StateRecord) -> None:
        file = await self._anchors.files.download(record)
        await self._worker.call(LoadPart(record.stage, record.part, record.round_number, file))
        self._anchors.files.remove(file)
