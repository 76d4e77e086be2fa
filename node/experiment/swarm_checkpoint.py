"""The state of an in-process swarm on disk, from which another process can continue with the same bits.

The folder of the swarm has only the newest round::

    round-NNNNNN/anchors                a checkpoint of all stages (node.checkpoint.global_model)
    round-NNNNNN/replica-MMMMM          private state of a replica (node.checkpoint.private_state)
    round-NNNNNN/steering.safetensors   state of a variation, if it has any
    round-NNNNNN/swarm.json             identity of the run, counters, current inner phases

A round appears complete or not at all. Size and hash are verified before use. Nothing is unpickled.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from node.checkpoint import global_model, private_state
from node.checkpoint.files import (
    FileEntry,
    NotNegative,
    Parameters,
    SealedFile,
    Sha256,
    corrupt,
    load_tensors,
    publish,
    verify_tensors,
    write_tensors,
)
from node.checkpoint.layout import ANY_ROUND, round_folder, rounds_below
from node.checkpoint.private_state import StageState
from node.core.worker.phase import InnerPhase
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec

log = logging.getLogger(__name__)

_ANCHORS, _STEERING, _RECORD = "anchors", "steering.safetensors", "swarm.json"


@dataclass(frozen=True)
class SavedPhase:
    """The current inner phase of a member. Floats are hexadecimal, because JSON has no NaN."""

    losses: tuple[str, ...]
    tokens: int
    steps: int
    skipped_steps: int
    norm: str

    @classmethod
    def of(cls, phase: InnerPhase) -> SavedPhase:
        losses = tuple(float(loss).hex() for loss in phase.losses)
        return cls(losses, phase.tokens, phase.steps, phase.skipped_steps, phase.norm.hex())

    def load_into(self, phase: InnerPhase) -> None:
        """Let `phase` continue as if these steps had been taken in it."""
        phase.losses = [torch.tensor(float.fromhex(loss)) for loss in self.losses]
        phase.tokens, phase.steps, phase.skipped_steps = self.tokens, self.steps, self.skipped_steps
        phase.norm = float.fromhex(self.norm)


@dataclass(frozen=True)
class Progress:
    """Counters of a replica between two rounds: `bytes_sent` of LocalReplica, the phase of each member."""

    bytes_sent: int
    phases: tuple[SavedPhase, ...]


@dataclass(frozen=True)
class Saved:
    """A verified swarm after `position` rounds. The private state of each replica is read on demand."""

    position: int
    link_bytes: int
    anchors: Mapping[int, Parameters]
    steering: Mapping[str, Tensor]
    replicas: tuple[Progress, ...]
    private_of: Callable[[int], Mapping[int, StageState]]
    """Reads the private state by position in the plan. CHECKPOINT_CORRUPT if the file has changed since."""


@dataclass(frozen=True)
class _TensorEntry:
    shape: tuple[int, ...]
    dtype: Literal["float32", "float64"]


@dataclass(frozen=True)
class _Swarm:
    format: Literal[1]
    spec_hash: Sha256
    terms: Sha256
    position: NotNegative
    link_bytes: int
    replicas: tuple[Progress, ...]
    steering: FileEntry | None
    tensors: Mapping[str, _TensorEntry]


_FILE = SealedFile(_Swarm)


def write(
    root: Path,
    spec: RunSpec,
    terms: str,
    position: int,
    link_bytes: int,
    steering: Mapping[str, Tensor],
    anchors: Mapping[int, Parameters],
    replicas: Iterable[tuple[Progress, Mapping[int, StageState]]],
) -> None:
    """Write the swarm after `position` rounds below `root`, then remove other rounds there.

    Args:
        terms: digest (hex) of the conditions besides the spec that must be equal when it is restored.
        replicas: in the order of the plan. They are taken one at a time.

    Raises:
        HetnodeError: DISK_FULL; the files below `root` are unchanged.
    """
    folder = root / round_folder(position)

    def fill(partial: Path) -> None:
        global_model.write(partial / _ANCHORS, spec, position, anchors)
        entries = []
        for index, (progress, private) in enumerate(replicas):
            place = partial / _folder_of(index)
            place.mkdir()
            private_state.write(place, spec, position, private)
            entries.append(progress)
        learned = None
        if steering:
            # The file format knows only float32, so a float64 value is stored as two float32 values.
            halves = {name: value.contiguous().view(torch.float32) for name, value in steering.items()}
            learned = write_tensors(partial / _STEERING, halves)
        record = _Swarm(
            format=1,
            spec_hash=spec.hash,
            terms=terms,
            position=position,
            link_bytes=link_bytes,
            replicas=tuple(entries),
            steering=learned,
            tensors={
                name: _TensorEntry(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))  # type: ignore[arg-type]
                for name, value in steering.items()
            },
        )
        _FILE.write(partial / _RECORD, record)

    publish(folder, fill, series=ANY_ROUND)
    for other in rounds_below(root).values():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def newest(root: Path, spec: RunSpec, terms: str) -> Saved | None:
    """The newest valid swarm below `root` with the same spec and `terms`, or None.

    Unusable ones are skipped with a warning.
    """
    for folder in rounds_below(root).values():
        try:
            return _read(folder, spec, terms)
        except HetnodeError as error:
            log.warning("skipping a saved swarm: %s", error)
    return None


def _read(folder: Path, spec: RunSpec, terms: str) -> Saved:
    record = _FILE.read(folder / _RECORD)
    if (record.spec_hash, record.terms) != (spec.hash, terms):
        raise corrupt(folder, "its run, variation or plan is different")
    found = global_model.read(folder / _ANCHORS)
    global_model.require_complete(found)
    if (found.spec, found.round_number) != (spec, record.position):
        raise corrupt(folder / _ANCHORS, "its run or round is different")

    def private_of(index: int) -> dict[int, StageState]:
        return private_state.read(folder / _folder_of(index), spec, record.position, range(spec.swarm.stages))

    # Verify all replicas now: a restore must not fail after it has changed some of them.
    for index in range(len(record.replicas)):
        private_of(index)
    return Saved(
        record.position,
        record.link_bytes,
        found.stages,
        _steering(folder, record),
        record.replicas,
        private_of,
    )


def _steering(folder: Path, record: _Swarm) -> dict[str, Tensor]:
    if record.steering is None:
        return {}
    path = folder / _STEERING
    if any(not each.shape for each in record.tensors.values()):
        raise corrupt(folder / _RECORD, "it has tensors without a shape")
    halves = {
        name: (*each.shape[:-1], each.shape[-1] * (2 if each.dtype == "float64" else 1))
        for name, each in record.tensors.items()
    }
    verify_tensors(path, record.steering, halves)
    return {
        name: value.view(getattr(torch, record.tensors[name].dtype))
        for name, value in load_tensors(path, halves).items()
    }


def _folder_of(index: int) -> str:
    return f"replica-{index:05d}"
