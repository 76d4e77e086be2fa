"""The snapshots of the embedding on one member: made where stage 0 is hosted, fetched where it is not."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from node.checkpoint import snapshots
from node.checkpoint.snapshots import StoredSnapshot
from node.core.train.anchor_files import AnchorFiles
from node.core.train.services import Services
from node.ipc.worker_calls import UseSnapshot, WriteSnapshot
from node.net.membership import jittered, until_answered
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.embedding_snapshot import active_snapshot, is_snapshot_round, needed_snapshots
from protocol.types import Part, StageRange

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class EmbeddingSnapshots:
    """A :class:`node.core.train.link_snapshots.LinkSnapshots`: on the disk, and the active one at the worker.

    Args:
        stages: those that this member hosts.
        folder: of this node's checkpoints.
    """

    def __init__(
        self, services: Services, stages: StageRange, anchor_files: AnchorFiles, folder: Path
    ) -> None:
        self._services, self._anchor_files, self._folder = services, anchor_files, folder
        self._every, self._is_host = services.spec.link.embedding_every, 0 in stages
        self._rollback = 0  # the newest that was applied here
        self._used = 0  # the snapshot in use; workers begin with that of round 0
        self._fetching: dict[int, asyncio.Task[StoredSnapshot]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def write(self, round_number: int) -> None:
        next_round = max(round_number + 1, self._services.membership.run_view.round_number)
        is_due = is_snapshot_round(round_number, self._every, self._rollbacks)
        if self._is_host and is_due and round_number in self._needed(next_round):
            try:
                digest = await self._services.worker.call(WriteSnapshot(self._folder, round_number))
            except HetnodeError as error:
                if error.code is not ErrorCode.DISK_FULL:
                    raise
                # As with a checkpoint: other hosts have it, and a later call tries again.
                log.warning("the snapshot after round %d is not written: %s", round_number, error)
                return
            self._tell(Part.SNAPSHOT, round_number, digest)
            await self._prune(next_round)

    async def tell_held(self, position: int) -> None:
        """Attest again what this node has on its disk and links still need: an earlier call may be lost.

        A host writes the snapshot of `position`, the round of its anchor, if it has died before it could.
        """
        held, needed = snapshots.held(self._folder), self._needed(position + 1)
        for each in (each for each in held if each in needed and each > 0):
            self._tell(Part.SNAPSHOT if self._is_host else Part.COPY, each, held[each].digest)
        if position not in held:
            await self.write(position)

    def note_rollback(self, round_number: int) -> None:
        self._rollback = max(self._rollback, round_number)

    def fetch_for(self, round_number: int) -> None:
        if not self._is_host:
            for each in self._needed(round_number):
                if each and not self._is_coming(each):
                    self._fetching[each] = asyncio.create_task(self._fetch(each))

    async def use(self, round_number: int) -> None:
        active = active_snapshot(round_number, self._every, self._rollbacks)
        if self._is_host or active == self._used:
            return
        while True:
            self.fetch_for(round_number)
            stored = await (self._made_of_initial() if active == 0 else self._fetching[active])
            try:
                await self._services.worker.call(UseSnapshot(stored.path, stored.digest))
                break
            except HetnodeError as error:
                if error.code is not ErrorCode.CHECKPOINT_CORRUPT:
                    raise
                log.warning("%s", error)
                stored.path.unlink(missing_ok=True)
        self._used = active
        await self._prune(round_number)

    async def close(self) -> None:
        """End the downloads and the calls to the coordinator."""
        tasks = [*self._fetching.values(), *self._telling]
        self._fetching.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self, part: Part, round_number: int, digest: str) -> None:
        telling = asyncio.create_task(self._attest(part, round_number, digest))
        self._telling.add(telling)
        telling.add_done_callback(self._note_told)

    def _is_coming(self, round_number: int) -> bool:
        """Whether a snapshot is being fetched, or was fetched and is still on the disk."""
        task = self._fetching.get(round_number)
        if task is None or not task.done():
            return task is not None
        return not task.cancelled() and task.exception() is None and task.result().path.exists()

    def _note_told(self, telling: asyncio.Task[None]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled() and (error := telling.exception()) is not None:
            log.warning("the coordinator does not count this node's snapshot of the embedding: %s", error)

    @property
    def _rollbacks(self) -> tuple[int, ...]:
        # A node trains only after the newest rollback, which so is the only one that counts.
        told = self._services.membership.run_view.rollback
        newest = max(self._rollback, 0 if told is None else told.round_number)
        return (newest,) if newest else ()

    def _needed(self, round_number: int) -> tuple[int, ...]:
        return needed_snapshots(round_number, self._every, self._rollbacks)

    async def _made_of_initial(self) -> StoredSnapshot:
        await self._services.worker.call(WriteSnapshot(self._folder, 0))
        return snapshots.held(self._folder)[0]

    async def _fetch(self, round_number: int) -> StoredSnapshot:
        """From this node's disk, or from any peer that has it; waits until one has."""
        while True:
            try:
                record = await until_answered(
                    lambda: self._anchor_files.locate(0, Part.SNAPSHOT, round_number), _RETRY_SECONDS
                )
                held = snapshots.held(self._folder).get(round_number)
                if held is None or held.digest != record.digest:
                    file = await self._anchor_files.download(record)
                    snapshots.adopt(self._folder, round_number, record.digest, file)
                    held = snapshots.held(self._folder)[round_number]
                await self._attest(Part.COPY, round_number, held.digest)
                return held
            except HetnodeError as error:
                if error.code is not ErrorCode.STATE_UNAVAILABLE:
                    raise
                log.info("%s", error)
            await asyncio.sleep(jittered(_RETRY_SECONDS))

    async def _attest(self, part: Part, round_number: int, digest: str) -> None:
        call = self._services.coordinator.attest
        await until_answered(lambda: call(0, round_number, part, digest), _RETRY_SECONDS)

    async def _prune(self, round_number: int) -> None:
        needed = self._needed(round_number)
        for each in [each for each in self._fetching if each not in needed]:
            self._fetching.pop(each).cancel()
        await asyncio.to_thread(snapshots.prune, self._folder, needed)
