"""The checkpoints that a node writes during training and continues from: the newest ones, below one folder.

Each folder ``round-NNNNNN`` is a checkpoint that other programs can read (node.checkpoint.global_model). It
also contains state that only this node can use (node.checkpoint.private_state).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from node.checkpoint import global_model, private_state
from node.checkpoint.files import Parameters
from node.checkpoint.private_state import StageState
from node.core.optimizer.outer_state import embedding_of
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.retention import is_kept
from protocol.spec.run import RunSpec
from protocol.types import StageRange

log = logging.getLogger(__name__)

KEEP = 2
"""Number of checkpoints to keep. More than one, because the newest may be unreadable."""


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint. `private` is None if the private state is missing or damaged.

    `stages` and `embedding` have parameters and optimizer state by name. `embedding` is None on a member that
    hosts stage 0, and if the checkpoint has no embedding. Tensors of files are read when they are used
    (files.stored_tensors).
    """

    round_number: int
    stages: Mapping[int, Parameters]
    embedding: Parameters | None
    private: Mapping[int, StageState] | None


def write(
    folder: Path,
    spec: RunSpec,
    round_number: int,
    stages: Mapping[int, Parameters],
    embedding: Parameters | None,
    private: Mapping[int, StageState],
    keep: int = KEEP,
) -> None:
    """Write the checkpoint after `round_number`, then remove older ones but the newest `keep` in all.

    Of those before them, some anchors stay for rollbacks (protocol.math.retention), without private
    state. Where the disk is full, the new checkpoint takes their place.

    `folder` is named ``round-NNNNNN``. `stages` and `embedding` are those of :class:`Restored`.

    Raises HetnodeError DISK_FULL, or BAD_OPTION if `folder` exists and is no checkpoint. Earlier checkpoints
    are unchanged, and nothing of this one remains.
    """

    def beside(partial: Path) -> None:
        private_state.write(partial, spec, round_number, private)

    try:
        global_model.write(folder, spec, round_number, stages, embedding, beside)
    except HetnodeError as error:
        spare = _older(folder, round_number, keep + 1)  # a failed write must leave `keep` checkpoints
        if error.code is not ErrorCode.DISK_FULL or not spare:
            raise
        log.warning("the disk is full: removing %d anchors that were kept for a rollback", len(spare))
        for path in spare.values():
            shutil.rmtree(path, ignore_errors=True)
        global_model.write(folder, spec, round_number, stages, embedding, beside)
    # Remove old ones only now: a failed write must leave the older checkpoints.
    for each, path in _older(folder, round_number, keep).items():
        if is_kept(each, round_number, spec.recovery.checkpoint_every):
            private_state.remove(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _older(folder: Path, round_number: int, keep: int) -> dict[int, Path]:
    """The checkpoints beside `folder` before the newest `keep`, of which `folder` is the first."""
    found = global_model.rounds_below(folder.parent)
    older = [each for each in found if each < round_number][keep - 1 :]
    return {each: found[each] for each in older}


def newest(root: Path, spec: RunSpec, stages: StageRange) -> Restored | None:
    """The newest valid checkpoint below `root` that has at least one of `stages`, or None.

    A checkpoint that has all stages and the embedding is preferred to a newer one that has only some, which
    happens after this node was assigned other stages. Unusable checkpoints are skipped with a warning.
    """
    partial: tuple[Path, Restored] | None = None
    for folder in global_model.rounds_below(root).values():
        try:
            found = global_model.verify(folder)
            hosted = {stage: found.committed(stage) for stage in stages if stage in found.stages}
            embedding = _embedding(found, stages)
        except HetnodeError as error:
            log.warning("skipping a checkpoint: %s", error)
            continue
        is_of_run = found.spec.identity == spec.identity
        if not is_of_run or not hosted:
            level = logging.INFO if is_of_run else logging.WARNING
            log.log(level, "skipping %s: it belongs to another run, or has none of stages %s", folder, stages)
            continue
        restored = Restored(found.round_number, hosted, embedding, None)
        needs_embedding = 0 not in stages and not spec.link.embedding_every
        if len(hosted) == len(stages) and not (needs_embedding and embedding is None):
            return _with_private(folder, spec, restored)
        partial = partial or (folder, restored)
    return partial and _with_private(partial[0], spec, partial[1])


def _embedding(found: global_model.Verified, stages: StageRange) -> Parameters | None:
    """The embedding for a member that does not host stage 0, which contains it."""
    if 0 in stages:
        return None
    if 0 in found.stages:
        return embedding_of(found.committed(0))
    return None if found.manifest.embedding is None else found.committed(None)


def _with_private(folder: Path, spec: RunSpec, found: Restored) -> Restored:
    if not private_state.is_in(folder):
        log.info("%s has anchors alone: error feedback and moments begin anew", folder)
        return found
    try:
        return replace(found, private=private_state.read(folder, spec, found.round_number, found.stages))
    except HetnodeError as error:
        log.warning("continuing without error feedback and moments: %s", error)
        return found
