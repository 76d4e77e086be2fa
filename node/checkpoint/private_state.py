"""The private state of a node's stages: progress that is not sent yet, and the optimizer's moments.

It is in the folder ``private`` of a checkpoint::

    stage-00.safetensors ...   error/NAME, first/NAME, second/NAME; local/NAME if it differs from the anchor;
                               table/NAME, table_first/NAME, table_second/NAME of the link into this stage
    private.json               round, and for each stage: file, bytes, sha-256, the optimizer's counters

It is not part of the global model: it is never served to others or assembled, and the anchors are complete
without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from node.checkpoint.files import (
    FileEntry,
    NotNegative,
    Parameters,
    SealedFile,
    Sha256,
    Shapes,
    corrupt,
    stored_tensors,
    verify_tensors,
    write_tensors,
)
from node.checkpoint.layout import stage_file
from node.core.model.shapes import is_of_layer, link_table_shapes, parameter_shapes
from node.core.optimizer.inner import Moments
from protocol.spec.run import RunSpec

_FOLDER = "private"
_RECORD = "private.json"
_MOMENTS = "first", "second"
_TABLE, _TABLE_MOMENTS = "table", ("table_first", "table_second")


@dataclass(frozen=True)
class TableState:
    """The token table of a link (node.core.model.link_table): values by name, and moments."""

    values: Parameters
    moments: Moments | None


@dataclass(frozen=True)
class StageState:
    """One stage: error feedback, moments, and the local parameters that differ from the anchor.

    `table` is that of the link into this stage, if there is one.
    """

    error: Parameters
    local: Parameters
    moments: Moments | None
    table: TableState | None = None

    @classmethod
    def of(
        cls,
        local: Parameters,
        anchor: Parameters,
        error: Parameters,
        moments: Moments | None,
    ) -> Self:
        """From the live state of a stage, between rounds."""
        found = {name: parameter.detach().cpu() for name, parameter in local.items()}
        # Right after a commit local equals the anchor, which the checkpoint already has.
        moved = {name: value for name, value in found.items() if not torch.equal(value, anchor[name])}
        return cls(error, moved, moments)


@dataclass(frozen=True)
class _Counters:
    steps: Annotated[int, Field(ge=1)]
    cold_steps: NotNegative | None


@dataclass(frozen=True)
class _TableEntry:
    moments: _Counters | None


@dataclass(frozen=True)
class _StageEntry:
    tensors: FileEntry
    local: tuple[str, ...]
    moments: _Counters | None
    table: Annotated[_TableEntry | None, Field(exclude_if=lambda table: table is None)] = None


@dataclass(frozen=True)
class _Private:
    format: Literal[1]
    spec_hash: Sha256
    round_number: NotNegative
    stages: Mapping[int, _StageEntry]


_FILE = SealedFile(_Private)


def write(folder: Path, spec: RunSpec, round_number: int, stages: Mapping[int, StageState]) -> None:
    """Write into the partial checkpoint `folder` before it is published. Raises OSError."""
    place = folder / _FOLDER
    place.mkdir()
    entries = {stage: _save(place / stage_file(stage), state) for stage, state in stages.items()}
    _FILE.write(place / _RECORD, _Private(1, spec.identity, round_number, entries))


def remove(folder: Path) -> None:
    """Leave the anchors in `folder` alone."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def is_in(folder: Path) -> bool:
    """Whether the checkpoint `folder` has private state: anchors that are kept for rollbacks have none."""
    return (folder / _FOLDER).exists()


def read(folder: Path, spec: RunSpec, round_number: int, stages: Iterable[int]) -> dict[int, StageState]:
    """The verified state of `stages` in the checkpoint `folder`, which was written after `round_number`.

    Its tensors are read when they are used (files.stored_tensors).

    Raises HetnodeError CHECKPOINT_CORRUPT if it is damaged, missing, or from another run or round.
    """
    place = folder / _FOLDER
    record = _FILE.read(place / _RECORD)
    if (record.spec_hash, record.round_number) != (spec.identity, round_number):
        raise corrupt(place / _RECORD, "its run or round differs from the anchors")
    states = {}
    for stage in stages:
        entry = record.stages.get(stage)
        if entry is None or entry.tensors.file != stage_file(stage):
            raise corrupt(place / _RECORD, f"it has no state of stage {stage}")
        shapes = parameter_shapes(spec, stage)
        seconds = second_moments(spec, shapes)
        states[stage] = _load(place, entry, shapes, seconds, link_table_shapes(spec))
    return states


def _save(path: Path, state: StageState) -> _StageEntry:
    parts = {"error": state.error, "local": state.local, **_moments_of(state.moments, _MOMENTS)}
    table: _TableEntry | None = None
    if state.table is not None:
        parts |= {_TABLE: state.table.values, **_moments_of(state.table.moments, _TABLE_MOMENTS)}
        table = _TableEntry(moments=_counters_of(state.table.moments))
    tensors = {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    return _StageEntry(
        tensors=write_tensors(path, tensors),
        local=tuple(state.local),
        moments=_counters_of(state.moments),
        table=table,
    )


def _load(place: Path, entry: _StageEntry, shapes: Shapes, seconds: Shapes, of_table: Shapes) -> StageState:
    path = place / entry.tensors.file
    if not shapes.keys() >= set(entry.local):
        raise corrupt(place / _RECORD, "it names tensors that the stage does not have")
    wanted: dict[str, Shapes] = {"error": shapes, "local": {name: shapes[name] for name in entry.local}}
    if entry.moments is not None:
        wanted |= dict(zip(_MOMENTS, (shapes, seconds), strict=True))
    if entry.table is not None:
        wanted[_TABLE] = of_table
        if entry.table.moments is not None:
            wanted |= dict.fromkeys(_TABLE_MOMENTS, of_table)
    expected = {f"{part}/{name}": shape for part, named in wanted.items() for name, shape in named.items()}
    verify_tensors(path, entry.tensors, expected)
    loaded = stored_tensors(path, expected)

    def named(part: str) -> dict[str, Tensor]:
        return {name: loaded[f"{part}/{name}"] for name in wanted[part]}

    def moments(counters: _Counters | None, parts: tuple[str, str]) -> Moments | None:
        if counters is None:
            return None
        first, second = map(named, parts)
        return {
            "steps": counters.steps,
            "cold_steps": counters.cold_steps,
            "exp_avg": first,
            "exp_avg_sq": second,
        }

    table = None
    if entry.table is not None:
        table = TableState(named(_TABLE), moments(entry.table.moments, _TABLE_MOMENTS))
    return StageState(named("error"), named("local"), moments(entry.moments, _MOMENTS), table)


def _moments_of(moments: Moments | None, parts: tuple[str, str]) -> dict[str, Parameters]:
    if moments is None:
        return {}
    return dict(zip(parts, (moments["exp_avg"], moments["exp_avg_sq"]), strict=True))


def _counters_of(moments: Moments | None) -> _Counters | None:
    if moments is None:
        return None
    return _Counters(steps=moments["steps"], cold_steps=moments["cold_steps"])


def second_moments(spec: RunSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Those of the parameters that have a second moment."""
    has_one = spec.inner.optimizer == "muon"
    return {name: shape for name, shape in shapes.items() if not (has_one and is_of_layer(name, len(shape)))}
