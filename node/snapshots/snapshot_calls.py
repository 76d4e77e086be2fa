"""The calls of the main process to the worker about snapshots of the embedding."""

from __future__ import annotations

from node.checkpoint import snapshot_codec, snapshots
from node.checkpoint.files import read_snapshot
from node.core.worker.worker import Worker
from node.ipc import worker_calls as calls


class SnapshotCalls:
    """They write and use what the trainer of a worker makes and derives T_perp from."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def write_snapshot(self, call: calls.WriteSnapshot) -> str:
        """Write the snapshot of the embedding below `folder`, that of the checkpoints.

        Raises HetnodeError DISK_FULL; nothing has changed.
        """
        snapshot_vd = self._worker.trainer.embedding_snapshot(call.round_number)
        if snapshot_vd is None:
            return ""
        data = snapshot_codec.encode(snapshot_vd)
        digest = snapshot_codec.snapshot_digest(data, *snapshot_vd.shape)
        snapshots.write(call.folder, call.round_number, digest, data)
        return digest

    def use_snapshot(self, call: calls.UseSnapshot) -> None:
        """Derive T_perp of this member's links from a snapshot, between two rounds, until the next call.

        Raises HetnodeError CHECKPOINT_CORRUPT; nothing has changed.
        """
        model = self._worker.trainer.spec.model
        shape = model.vocabulary, model.width
        self._worker.trainer.hosted.use_snapshot(read_snapshot(call.file, call.digest, shape))
