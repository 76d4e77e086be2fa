"""The global model on disk: the committed state of some or all stages after one round.

A checkpoint is a folder::

    stage-00.safetensors ...   parameters under their canonical names, float32
    embedding.safetensors      only the token embedding, written by a member that does not host stage 0
    spec.json                  canonical JSON of the RunSpec
    manifest.json              run, round, and for each tensor file: bytes, sha-256, anchor digest

If the outer optimizer has state, such as momentum, the tensor files of rounds >= 1 contain it under the
names of protocol.math.outer_optimizer.state_name. Before round 1 it is 0 and in no file, so the digest
of given parameters (`RunSpec.initial`) does not depend on the optimizer. It is never exported.

A node's checkpoints also contain private state (node.checkpoint.private_state), which this module ignores.
The folder appears complete or not at all (node.checkpoint.files.publish). Nothing is unpickled. Hash, names,
dtypes and shapes of a file are verified before its tensors are used.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from node.checkpoint import layout
from node.checkpoint.files import (
    FileEntry,
    NotNegative,
    Parameters,
    SealedFile,
    Sha256,
    Shapes,
    corrupt,
    publish,
    read_text,
    stored_tensors,
    verify_tensors,
    write_tensors,
    write_text,
)
from node.checkpoint.layout import ANY_ROUND, EMBEDDING_FILE, round_of, stage_file
from node.core.model.shapes import embedding_shapes, parameter_shapes
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_optimizer import committed_shapes, parameters_of
from protocol.math.outer_step import anchor_digest
from protocol.spec.run import RunSpec

_MANIFEST = "manifest.json"
_SPEC = "spec.json"


@dataclass(frozen=True)
class AnchorEntry(FileEntry):
    """A tensor file of a checkpoint, with the digest of its tensors."""

    anchor_digest: Sha256


@dataclass(frozen=True)
class Manifest:
    """The record in manifest.json."""

    format: Literal[1]
    run_id: str
    spec_hash: Sha256
    round_number: NotNegative
    stages: Mapping[int, AnchorEntry]
    embedding: AnchorEntry | None

    @property
    def files(self) -> Mapping[int | None, AnchorEntry]:
        """The tensor files by stage; None stands for the separate file of the embedding."""
        found = dict[int | None, AnchorEntry](self.stages.items())
        return found if self.embedding is None else {**found, None: self.embedding}


MANIFEST_FILE = SealedFile(Manifest)


@dataclass(frozen=True)
class Checkpoint:
    """The committed state after `round_number` rounds, verified.

    `stages` has the parameters and the optimizer state of each stage, by name. `embedding` has those of the
    token embedding if it has a separate file, else it is None.
    """

    spec: RunSpec
    round_number: int
    stages: Mapping[int, Parameters]
    embedding: Parameters | None = None


@dataclass(frozen=True)
class Verified:
    """A checkpoint on disk whose files are verified. Tensors are read on demand."""

    folder: Path
    spec: RunSpec
    manifest: Manifest

    @property
    def round_number(self) -> int:
        return self.manifest.round_number

    @property
    def stages(self) -> Mapping[int, AnchorEntry]:
        return self.manifest.stages

    def tensors(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters of a stage in canonical order, float32 on the CPU, one at a time in memory.

        The file is read now and not verified again. The state of the outer optimizer is left out. Raises
        CHECKPOINT_CORRUPT.
        """
        found = stored_tensors(self.folder / stage_file(stage), parameter_shapes(self.spec, stage))
        return ((name, tensor.detach()) for name, tensor in found.items())

    def load(self, stage: int) -> dict[str, Tensor]:
        """The parameters of a stage, float32 on the CPU. Raises CHECKPOINT_CORRUPT."""
        return _loaded(parameters_of(self.committed(stage)))

    def committed(self, stage: int | None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """All tensors of a stage, or with None those of the separate embedding. Raises CHECKPOINT_CORRUPT.

        Their digest is verified now; each is read again when it is used (files.stored_tensors).
        """
        entry = self.manifest.files[stage]
        path = self.folder / entry.file
        tensors = stored_tensors(path, _shapes(self.spec, stage, self.round_number), device)
        if anchor_digest(tensors) != entry.anchor_digest:
            raise corrupt(path, "its anchor digest differs from the manifest")
        return tensors


def write(
    folder: Path,
    spec: RunSpec,
    round_number: int,
    stages: Mapping[int, Parameters] | Iterable[tuple[int, Parameters]],
    embedding: Parameters | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write the committed state of `stages` after `round_number` rounds as the checkpoint `folder`.

    Parent folders are created. An existing checkpoint is replaced by two renames. Between them a reader finds
    no checkpoint; after a crash between them the next write restores the old one first.

    Args:
        stages: of tensors that are read when they are used, only one at a time is in memory.
        beside: writes more files into the folder that it is given; the manifest does not cover them.

    Raises:
        HetnodeError: BAD_OPTION if `folder` exists and is no checkpoint; DISK_FULL. In both cases `folder` is
            unchanged.
        ValueError: names, dtypes or shapes differ from the spec.
        OSError: another disk error; `folder` is unchanged.
    """
    _require_replaceable(folder)

    def fill(partial: Path) -> None:
        pairs = stages.items() if isinstance(stages, Mapping) else stages
        entries = {stage: _save(partial, spec, round_number, stage, each) for stage, each in pairs}
        if beside is not None:
            beside(partial)
        manifest = Manifest(
            format=1,
            run_id=spec.name,
            spec_hash=spec.hash,
            round_number=round_number,
            stages=entries,
            embedding=None if embedding is None else _save(partial, spec, round_number, None, embedding),
        )
        # The manifest comes last: without it the folder is not a checkpoint.
        write_text(partial / _SPEC, spec.canonical_json)
        MANIFEST_FILE.write(partial / _MANIFEST, manifest)

    publish(folder, fill, series="" if round_of(folder.name) is None else ANY_ROUND)


def read(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read and verify all stages in a checkpoint, which may be only some stages of the run.

    Raises HetnodeError CHECKPOINT_MISSING or CHECKPOINT_CORRUPT.
    """
    found = verify(folder)
    stages = {stage: _loaded(found.committed(stage, device)) for stage in sorted(found.stages)}
    embedding = None if found.manifest.embedding is None else _loaded(found.committed(None, device))
    return Checkpoint(found.spec, found.round_number, stages, embedding)


def _loaded(tensors: Parameters) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def verify(folder: Path) -> Verified:
    """Verify the checkpoint `folder` without loading it. Raises CHECKPOINT_MISSING or CHECKPOINT_CORRUPT."""
    if not (folder / _MANIFEST).exists():
        remedy = "Name a folder that a run has written; a node writes its first checkpoint after some rounds."
        raise _missing(f"There is no checkpoint in {folder} (it has no {_MANIFEST})", remedy)
    manifest = MANIFEST_FILE.read(folder / _MANIFEST)
    spec = _read_spec(folder / _SPEC, manifest)
    for stage, entry in manifest.files.items():
        if entry.file != _file(stage) or (stage is not None and not 0 <= stage < spec.swarm.stages):
            part = "embedding" if stage is None else f"stage {stage}"
            raise corrupt(folder / _MANIFEST, f"the run has no {part} in a file {entry.file}")
        verify_tensors(folder / entry.file, entry, _shapes(spec, stage, manifest.round_number))
    return Verified(folder, spec, manifest)


def rounds_below(root: Path) -> dict[int, Path]:
    """The round folders below `root` that have a manifest, newest first. They are not verified."""
    found = layout.rounds_below(root)
    return {round_number: path for round_number, path in found.items() if (path / _MANIFEST).is_file()}


def latest(root: Path) -> Path | None:
    """The ``round-NNNNNN`` folder of the highest round below `root` whose files verify, or None."""
    for path in rounds_below(root).values():
        with suppress(HetnodeError):
            return verify(path).folder
    return None


def find(place: Path) -> Path:
    """The checkpoint at `place`, which may be a run folder, a node's folder, or the checkpoint itself.

    A run that has not ended has none of its own: that of its first node, a full replica if it has one.
    If `place` is a checkpoint itself, it is not verified yet. If there is no checkpoint, `place` is returned,
    so that reading it reports the error.
    """
    for folder in (place, place / "checkpoint"):
        if (folder / _MANIFEST).exists():
            return folder
    nodes = (each / "checkpoint" for each in sorted((place / "nodes").glob("*")))
    return next(filter(None, map(latest, (place, place / "checkpoint", *nodes))), place)


def find_whole(place: Path, beyond: int) -> tuple[int, tuple[Path, ...]] | None:
    """The newest round after `beyond` of which `place` has all stages, and the checkpoints with them.

    `place` as for :func:`find`; in the folder of a swarm, the checkpoints of its nodes count together. None
    of them is verified.
    """
    nodes = (each / "checkpoint" for each in sorted((place / "nodes").glob("*")))
    found = defaultdict[int, dict[int, Path]](dict)
    for root in (place, place / "checkpoint", *nodes):
        for folder in (root, *rounds_below(root).values()):
            with suppress(HetnodeError, OSError):  # it may be removed at any time
                manifest = MANIFEST_FILE.read(folder / _MANIFEST)
                if manifest.round_number > beyond:
                    for stage in manifest.stages:
                        found[manifest.round_number].setdefault(stage, folder)
    for number, holders in sorted(found.items(), reverse=True):
        with suppress(HetnodeError, OSError, StopIteration):
            folder = next(iter(holders.values()))
            spec = _read_spec(folder / _SPEC, MANIFEST_FILE.read(folder / _MANIFEST))
            if holders.keys() == set(range(spec.swarm.stages)):
                return number, tuple(dict.fromkeys(holders.values()))
    return None


def read_together(parts: Sequence[Path], device: torch.device | str = "cpu") -> Checkpoint:
    """All stages of :func:`find_whole`, verified. Raises HetnodeError as :func:`read`."""
    found = [read(part, device) for part in parts]
    stages = {stage: each.stages[stage] for each in reversed(found) for stage in each.stages}
    return replace(found[0], stages=stages, embedding=None)


def assemble(parts: Sequence[Path], folder: Path) -> None:
    """Combine the checkpoints that several members wrote after the same round into one complete checkpoint.

    Every part is verified, and tensors are copied one at a time. After an error nothing is written.

    Raises:
        HetnodeError: BAD_OPTION as :func:`write`; CHECKPOINT_CORRUPT if a part is corrupt, or if the parts
            have different runs or rounds; ANCHOR_DIVERGED if two parts have different parameters for one
            stage; CHECKPOINT_MISSING if a part or a stage is missing.
    """
    if not parts:
        raise _missing("There are no parts to assemble")
    verified = [verify(part) for part in parts]
    first = verified[0]
    holder: dict[int, Verified] = {}
    for part in verified:
        manifest, reference = part.manifest, first.manifest
        if (manifest.run_id, manifest.round_number) != (reference.run_id, reference.round_number):
            raise corrupt(
                part.folder,
                f"it is of run {manifest.run_id} after round {manifest.round_number}, "
                f"but {first.folder} is of run {reference.run_id} after round {reference.round_number}",
            )
        for stage, entry in part.stages.items():
            # Several members may host a stage; their anchors must be equal in every bit.
            other = holder.setdefault(stage, part)
            if other.stages[stage].anchor_digest != entry.anchor_digest:
                raise HetnodeError(
                    ErrorCode.ANCHOR_DIVERGED,
                    f"The checkpoints {other.folder} and {part.folder} hold different parameters of stage "
                    f"{stage}.",
                    "Leave out the part of the replica that diverged; the coordinator's log has the digests.",
                )
    _require_all(first.spec, holder, "no part holds")
    loaded = ((stage, holder[stage].committed(stage)) for stage in sorted(holder))
    write(folder, first.spec, first.round_number, loaded)


def require_complete(found: Checkpoint | Verified) -> None:
    """Raise CHECKPOINT_MISSING, naming the stages, unless the checkpoint has every stage of its run."""
    _require_all(found.spec, found.stages, "the checkpoint does not hold")


def _require_all(spec: RunSpec, stages: Iterable[int], lack: str) -> None:
    if missing := sorted(set(range(spec.swarm.stages)) - set(stages)):
        listed = f"stage{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise _missing(f"Of {spec.swarm.stages} stages, {lack} {listed}")


def _require_replaceable(folder: Path) -> None:
    """Raise BAD_OPTION unless `folder` is free, empty, or a checkpoint: other files belong to the user."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / _MANIFEST).is_file():
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"{folder} exists and is not a checkpoint.",
            "Name a folder that does not exist yet; nothing was changed.",
        )


def _file(stage: int | None) -> str:
    return EMBEDDING_FILE if stage is None else stage_file(stage)


def _shapes(spec: RunSpec, stage: int | None, round_number: int) -> Shapes:
    """Shapes of all tensors in a file after that round: parameters, and from round 1 on optimizer state."""
    parameters = embedding_shapes(spec) if stage is None else parameter_shapes(spec, stage)
    return committed_shapes(parameters, spec.outer) if round_number else parameters


def _save(
    partial: Path, spec: RunSpec, round_number: int, stage: int | None, committed: Parameters
) -> AnchorEntry:
    tensors = committed if round_number else parameters_of(committed)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    is_float32 = all(tensor.dtype == torch.float32 for tensor in tensors.values())
    if found != _shapes(spec, stage, round_number) or not is_float32:
        raise ValueError(f"the parameters for {_file(stage)} are not the float32 tensors of the spec")
    entry = write_tensors(partial / _file(stage), tensors)
    return AnchorEntry(entry.file, entry.bytes, entry.sha256, anchor_digest(tensors))


def _read_spec(path: Path, manifest: Manifest) -> RunSpec:
    text = read_text(path)
    if hashlib.sha256(text.encode()).hexdigest() != manifest.spec_hash:
        raise corrupt(path, "its hash differs from the manifest")
    try:
        spec = RunSpec.from_json(text)
    except HetnodeError as error:
        raise corrupt(path, f"another version of hetnode wrote it ({error.cause.rstrip('.')})") from None
    # Another version may accept the text but add or change defaults, which gives another hash.
    if spec.hash != manifest.spec_hash:
        raise corrupt(path, "another version of hetnode wrote it")
    return spec


_WHOLE = "Name that of a full replica, or give 'hetnode export' the folders of members that have all stages."


def _missing(cause: str, remedy: str = _WHOLE) -> HetnodeError:
    return HetnodeError(ErrorCode.CHECKPOINT_MISSING, f"{cause}.", remedy)
