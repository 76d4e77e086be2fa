"""The parameters before round 1 of a run that starts from given ones, such as an imported model's.

Their digests are part of the specification (`RunSpec.initial`), so all members start from the same bits; the
files themselves are each machine's own affair.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from node.checkpoint import global_model
from node.model.init import (
    InitialParameters,
    initial_parameters,
    initial_unavailable,
    parameter_shapes,
)
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec


def initial_from(place: Path | None) -> InitialParameters:
    """Where a trainer gets them: from the checkpoint at `place` if the run wants given ones, else its seed.

    `place` is what ``hetnode import`` has written, or a checkpoint of the same parameters cut into the same
    stages. Raises, when asked for a stage:
        HetnodeError: INITIAL_UNAVAILABLE where the run wants given ones and `place` is None or holds others;
            CHECKPOINT_MISSING or CHECKPOINT_CORRUPT where it holds none.
    """

    @cache
    def stored(place: Path) -> global_model.Verified:
        return global_model.verify(global_model.find(place))

    def initial(spec: RunSpec, stage: int) -> dict[str, Tensor]:
        if spec.initial is None or place is None:
            return initial_parameters(spec, stage)
        _require_given(stored(place), spec, stage, spec.initial[stage])
        return stored(place).load(stage)

    return initial


def require_initial(spec: RunSpec, place: Path | None) -> None:
    """Make sure that a run can start here, as far as parameters are concerned. Raises as :func:`initial_from`
    does, for all stages.
    """
    if spec.initial is None:
        return
    if place is None:
        raise initial_unavailable(spec)
    stored = global_model.verify(global_model.find(place))
    for stage, digest in enumerate(spec.initial):
        _require_given(stored, spec, stage, digest)


def _require_given(stored: global_model.Verified, spec: RunSpec, stage: int, digest: str) -> None:
    entry = stored.manifest.stages.get(stage)
    fits = stage < stored.spec.swarm.stages and (
        parameter_shapes(stored.spec, stage) == parameter_shapes(spec, stage)
    )
    if entry is None or not fits or entry.anchor_digest != digest:
        raise HetnodeError(
            ErrorCode.INITIAL_UNAVAILABLE,
            f"Stage {stage} in {stored.folder} is not the one from which run {spec.run_id} starts.",
            "Give --initial the folder that 'hetnode import' has written for this run, or import the same "
            "model with the run's file (--config).",
        )
