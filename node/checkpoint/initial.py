"""The parameters before round 1 of a run that starts from given parameters, such as an imported model.

Their digests are part of the specification (`RunSpec.initial`), so all members start from the same bits. Each
machine chooses where it keeps the files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from node.checkpoint import global_model
from node.checkpoint.files import write_tensors
from node.checkpoint.layout import round_folder, stage_file
from node.core.model.init import InitialParameters, initial_parameters, initial_unavailable
from node.core.model.shapes import parameter_shapes
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_optimizer import initial_state
from protocol.spec.run import RunSpec


def initial_from(place: Path | None) -> InitialParameters:
    """A function that returns initial parameters: from the checkpoint at `place`, or from the run's seed.

    The checkpoint is used only if the run starts from given parameters. `place` is a folder that ``hetnode
    import`` has written, or a checkpoint of the same parameters in the same stages. The returned function
    raises HetnodeError INITIAL_UNAVAILABLE if the run needs given parameters and `place` is None or has other
    parameters; CHECKPOINT_MISSING or CHECKPOINT_CORRUPT if it has no usable checkpoint.
    """

    @cache  # verifying reads all files, so do it once for all stages
    def stored(place: Path) -> global_model.Verified:
        return global_model.verify(global_model.find(place))

    def initial(spec: RunSpec, stage: int) -> dict[str, Tensor]:
        if spec.initial is None or place is None:
            return initial_parameters(spec, stage)
        _require_given(stored(place), spec, stage, spec.initial[stage])
        return stored(place).load(stage)

    return initial


@dataclass(frozen=True)
class InitialAnchors:
    """The anchors before round 1 that a node hands on to other peers.

    Attributes:
        place: as in :func:`initial_from`.
        stages: those that the node hosts.
    """

    spec: RunSpec
    place: Path | None
    stages: tuple[int, ...]

    def write(self, folder: Path, stage: int) -> None:
        """Write the anchor of `stage` into the folder of round 0 below `folder`.

        The file has the tensors of a later checkpoint: the parameters, and the state of the outer optimizer,
        which is 0. Raises as :func:`initial_from`, and OSError for a full disk.
        """
        parameters = initial_from(self.place)(self.spec, stage)
        file = folder / round_folder(0) / stage_file(stage)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}-{os.getpid()}")  # each stage has a process that may write
        write_tensors(partial, parameters | initial_state(parameters, self.spec.outer.slots))
        partial.replace(file)


def require_initial(spec: RunSpec, place: Path | None) -> None:
    """Check that the initial parameters of all stages are available. Raises as :func:`initial_from`."""
    if spec.initial is None:
        return
    if place is None:
        raise initial_unavailable(spec)
    stored = global_model.verify(global_model.find(place))
    for stage, digest in enumerate(spec.initial):
        _require_given(stored, spec, stage, digest)


def _require_given(stored: global_model.Verified, spec: RunSpec, stage: int, digest: str) -> None:
    entry = stored.manifest.stages.get(stage)
    # A stage beyond those of the stored run has no entry.
    fits = entry is not None and parameter_shapes(stored.spec, stage) == parameter_shapes(spec, stage)
    if entry is None or not fits or entry.anchor_digest != digest:
        raise HetnodeError(
            ErrorCode.INITIAL_UNAVAILABLE,
            f"Stage {stage} in {stored.folder} differs from the initial parameters of run {spec.name}.",
            "Give --initial the folder that 'hetnode import' has written for this run, or import the same "
            "model with the run's file (--config).",
        )
