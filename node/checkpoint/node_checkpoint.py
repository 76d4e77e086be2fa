"""The checkpoints that a node writes as it trains, to go on from: the last few, below one folder.

Each is ``round-NNNNNN``: a checkpoint as others read it (node.checkpoint.global_model), and in it what only
this node can use (node.checkpoint.private_state).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from node.checkpoint import global_model, private_state
from node.checkpoint.files import Parameters
from node.checkpoint.private_state import StageState
from node.optimizer.outer_state import embedding_of
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.types import StageRange

log = logging.getLogger(__name__)

KEEP = 2
"""How many are kept: one that turns out to be unreadable must not be the only one."""


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint. `private` is None where the anchors are good and this node's own state is not.

    `stages` and `embedding` hold parameters and optimizer state by name. `embedding` is None on a member that
    hosts stage 0, and where the checkpoint has none.
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
    """Write the checkpoint after `round`, and keep `keep` in all beside it.

    Args:
        folder: its own, named ``round-NNNNNN``.
        stages: parameters and optimizer state of each hosted stage, by name.
        embedding: those of the token embedding, on a member that does not host stage 0.

    Raises:
        HetnodeError: DISK_FULL, or BAD_OPTION where something else stands in the place. The checkpoints
            before are untouched, and nothing is left of this one.
    """

    def beside(partial: Path) -> None:
        private_state.write(partial, spec, round_number, private)

    global_model.write(folder, spec, round_number, stages, embedding, beside)
    older = [
        path for number, path in global_model.rounds_below(folder.parent).items() if number < round_number
    ]
    for path in older[keep - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def newest(root: Path, spec: RunSpec, stages: StageRange) -> Restored | None:
    """The newest checkpoint below `root` that verifies and is of any use to a host of `stages`, or None.

    One that has all of them, and the embedding, comes before one that has some, as where this node was moved
    to other stages. One that cannot be used is passed over with a warning.
    """
    partial = None
    for folder in global_model.rounds_below(root).values():
        try:
            found = global_model.read(folder)
        except HetnodeError as error:
            log.warning("passing over a checkpoint: %s", error)
            continue
        hosted = {stage: found.stages[stage] for stage in stages if stage in found.stages}
        if found.spec != spec or not hosted:
            log.warning("passing over %s: it is of another run, or has none of stages %s", folder, stages)
            continue
        embedding = None if 0 in stages else _embedding(found)
        private = _private(folder, spec, found.round_number, hosted)
        restored = Restored(found.round_number, hosted, embedding, private)
        if len(hosted) == len(stages) and (0 in stages or embedding is not None):
            return restored
        partial = partial or restored
    return partial


def _embedding(found: global_model.Checkpoint) -> Parameters | None:
    """As it was committed, whether the checkpoint is of a host of stage 0 or of another member."""
    return embedding_of(found.stages[0]) if 0 in found.stages else found.embedding


def _private(
    folder: Path, spec: RunSpec, round_number: int, stages: Iterable[int]
) -> dict[int, StageState] | None:
    try:
        return private_state.read(folder, spec, round_number, stages)
    except HetnodeError as error:
        log.warning("going on without error feedback and moments: %s", error)
        return None
