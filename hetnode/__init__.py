"""Hetnode for programs and notebooks: open a run, start a swarm on this machine, load a model.

The commands do the same with the same code. To import this costs little: torch, grpc and pandas are imported
where they are needed. What fails raises :class:`HetnodeError`, whose `code` is stable.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetnode.runs import TABLES, OpenedRun, open_run
from hetnode.swarm import RunningSwarm, local_swarm
from protocol.errors import ErrorCode, HetnodeError

if TYPE_CHECKING:
    from hetnode.models import LoadedModel

__all__ = (
    "TABLES",
    "ErrorCode",
    "HetnodeError",
    "OpenedRun",
    "RunningSwarm",
    "load_model",
    "local_swarm",
    "open_run",
)


def load_model(place: str | Path, device: str = "cpu") -> LoadedModel:
    """The model at `place` as a torch module, whose forward takes ids [b, L] and gives logits [b, L, V].

    Args:
        place: folder of a run, a node, a checkpoint, or of an export (``hetnode export``) or another model in
            the layout of Hugging Face; or the name of a swarm in ./runs, of a run or of a node here.
        device: as torch names it.

    Raises:
        HetnodeError: CHECKPOINT_MISSING, also where some stages are elsewhere; CHECKPOINT_CORRUPT,
            UNSUPPORTED_MODEL, BAD_OPTION where several nodes are meant.
    """
    from hetnode.models import load  # noqa: PLC0415

    return load(Path(place), device)
