"""Files with one part of an anchor, from this node's own checkpoints or from those of other peers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from node.checkpoint import parts
from node.checkpoint.download import CheckpointDownload
from node.core.train.services import Services
from node.ipc.worker_calls import StageInfo
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import HASH_BYTES, digest_of
from protocol.status import Wait
from protocol.types import Part, StateRecord

log = logging.getLogger(__name__)

_DOWNLOAD_SECONDS = 3600.0
_PIECE_BYTES = 1 << 20


class AnchorFiles:
    """Obtains the bytes of parts, verified against the digest that the coordinator has signed.

    The caller removes a file with :meth:`remove` when the worker has loaded it.

    Args:
        folder: of this node's own checkpoints; new files are in ``folder/incoming``.
    """

    def __init__(self, services: Services, stage_info: StageInfo, folder: Path) -> None:
        self._services, self._stage_info, self._folder = services, stage_info, folder
        self._peer = services.identity.peer

    async def download(self, record: StateRecord) -> Path:
        """From other peers. Raises HetnodeError: STATE_UNAVAILABLE where none of them gives it whole."""
        services = self._services
        hosts = services.membership.run_view.hosts()
        holders = set(record.holders) & hosts.keys() - {self._peer}
        donors = {peer: hosts[peer].first for peer in holders}
        info = self._stage_info.info_of(record.stage, record.part)
        file = self._file_of(record)
        file.parent.mkdir(parents=True, exist_ok=True)
        log.info(
            "loading %s %d of round %d (%d bytes) from %d peers",
            *(record.part.value, record.stage, record.round_number, info.nbytes, len(donors)),
        )
        download = CheckpointDownload(record, donors, info.nbytes, info.header, file)
        with services.figures.waits.on(Wait.CHECKPOINT):
            await services.transport.fetch_checkpoint(download, _DOWNLOAD_SECONDS)
        return file

    async def of_round(self, stage: int, part: Part, round_number: int) -> Path:
        """The anchor after exactly that round, from this node's own checkpoint if that is right.

        Raises HetnodeError: STATE_UNAVAILABLE where no peer that is here gives it.
        """
        record = await self.locate(stage, part, round_number)
        own = await asyncio.to_thread(self._own, record)
        return await self.download(record) if own is None else own

    async def locate(self, stage: int, part: Part, round_number: int) -> StateRecord:
        """What the coordinator knows of that part. Raises as :meth:`of_round`."""
        located = await self._services.coordinator.locate(stage, part, round_number)
        record = next((each for each in located if each.round_number == round_number), None)
        if record is None:
            raise HetnodeError(
                ErrorCode.STATE_UNAVAILABLE,
                f"No peer that is here has {part.value} {stage} after round {round_number}.",
                "No action is needed: this node tries again, also with later checkpoints.",
            )
        return record

    def has_begun(self, record: StateRecord) -> bool:
        """Whether an earlier download has left a part of it here."""
        return self._file_of(record).exists()

    def remove(self, file: Path) -> None:
        """Remove a file and what downloads of the same part have left of other rounds."""
        for leftover in file.parent.glob(f"{file.name.rpartition('-')[0]}-*"):
            leftover.unlink()

    def _file_of(self, record: StateRecord) -> Path:
        name = f"{record.part.value}-{record.stage:02d}-{record.round_number:06d}"
        return self._folder / "incoming" / name

    def _own(self, record: StateRecord) -> Path | None:
        """The part from this node's checkpoint; None where there is none, or another one than all have."""
        info = self._stage_info.parts[record.stage, record.part]
        found = parts.find(self._folder, record.stage, record.part, record.round_number)
        if found is None or found.nbytes != info.nbytes:
            return None
        file = self._file_of(record)
        try:
            hashes = parts.chunk_hashes(found)
            chunks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
            if digest_of(info.header, chunks) != record.digest:
                log.warning("%s is not the anchor of the others", found.path)
                return None
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as copy:
                copy.writelines(parts.pieces(found, range(found.nbytes), _PIECE_BYTES))
        except OSError as error:
            log.warning("%s cannot be used: %s", found.path, error)
            return None
        return file
