"""The checkpoints that a node writes as it trains, to go on from: the last few, below one folder.

Each is ``round-NNNNNN``: a checkpoint as others read it (node.checkpoint), and in it what only this node can
use (node.private_state).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from node import checkpoint, private_state
from node.checkpoint_files import Parameters
from node.private_state import StageState
from protocol.errors import HetnodeError
from protocol.spec import RunSpec
from protocol.types import StageRange

log = logging.getLogger(__name__)

KEEP = 2
"""How many are kept: one that turns out to be unreadable must not be the only one."""


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint. `private` is None where the anchors are good and this node's own state is not.

    `embedding` is None on a member that hosts stage 0.
    """

    round: int
    stages: Mapping[int, Parameters]
    embedding: Tensor | None
    private: Mapping[int, StageState] | None


def _nothing(_: Path) -> None:
    pass


def write(
    folder: Path,
    spec: RunSpec,
    round: int,
    stages: Mapping[int, Parameters],
    embedding: Tensor | None,
    private: Mapping[int, StageState],
    midway: Callable[[Path], None] = _nothing,
    keep: int = KEEP,
) -> None:
    """Write the checkpoint after `round`, and keep `keep` in all beside it.

    Args:
        folder: its own, named ``round-NNNNNN``.
        embedding: the committed table [V, d] on a member that does not host stage 0.
        midway: called with the hidden folder when some of the files are in it.

    Raises:
        HetnodeError: DISK_FULL, or BAD_OPTION where something else stands in the place. The checkpoints
            before are untouched, and nothing is left of this one.
    """

    def beside(partial: Path) -> None:
        midway(partial)
        private_state.write(partial, spec, round, private)

    checkpoint.write(folder, spec, round, stages, embedding, beside)
    older = [path for number, path in checkpoint.rounds_below(folder.parent).items() if number < round]
    for path in older[keep - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def newest(root: Path, spec: RunSpec, stages: StageRange) -> Restored | None:
    """The newest checkpoint below `root` that verifies and has all that a host of `stages` needs, or None.

    One that cannot be used is passed over with a warning.
    """
    for folder in checkpoint.rounds_below(root).values():
        try:
            found = checkpoint.read(folder)
        except HetnodeError as error:
            log.warning("passing over a checkpoint: %s", error)
            continue
        if found.spec != spec or not found.stages.keys() >= set(stages):
            log.warning("passing over %s: it is of another run, or lacks some of stages %s", folder, stages)
            continue
        if 0 not in stages and found.embedding is None:
            log.warning("passing over %s: it lacks the embedding", folder)
            continue
        embedding = None if 0 in stages else found.embedding
        hosted = {stage: found.stages[stage] for stage in stages}
        return Restored(found.round, hosted, embedding, _private(folder, spec, found.round, stages))
    return None


def _private(folder: Path, spec: RunSpec, round: int, stages: StageRange) -> dict[int, StageState] | None:
    try:
        return private_state.read(folder, spec, round, stages)
    except HetnodeError as error:
        log.warning("going on without error feedback and moments: %s", error)
        return None
