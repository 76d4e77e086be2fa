"""The global model on disk: the anchors of some or all stages after one round.

A checkpoint is a folder::

    stage-00.safetensors ...   parameters under their canonical names, float32
    spec.json                  canonical JSON of the RunSpec
    manifest.json              run, round, and for each stage: file, bytes, sha-256, anchor digest

The folder is written under a hidden name beside its place, flushed, and renamed: a crash leaves the hidden
folder, which the next write removes, and never half a checkpoint. One process writes below one parent folder.
Nothing is unpickled, and nothing is used before its hash, names, dtypes and shapes are verified.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from node.model.init import parameter_shapes
from protocol.errors import ErrorCode, HetnodeError
from protocol.round import anchor_digest
from protocol.spec import RunSpec

Parameters = Mapping[str, Tensor]

_MANIFEST = "manifest.json"
_SPEC = "spec.json"
_PARTIAL = ".hetnode-partial"
_REPLACED = ".hetnode-replaced"
_JSON_LIMIT = 2**20
_HEX_DIGEST = r"^[0-9a-f]{64}$"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StageEntry(_Record):
    """One stage of a checkpoint: its file, that file's size and hash, and the digest of the parameters."""

    file: str
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_HEX_DIGEST)
    anchor_digest: str = Field(pattern=_HEX_DIGEST)


class Manifest(_Record):
    """What a checkpoint holds. `checksum` covers all other fields."""

    format: Literal[1] = 1
    run_id: str
    spec_hash: str = Field(pattern=_HEX_DIGEST)
    round: int = Field(ge=0)
    stages: dict[int, StageEntry]
    checksum: str = ""

    def sealed(self) -> Manifest:
        body = json.dumps(self.model_dump(exclude={"checksum"}), sort_keys=True).encode()
        return self.model_copy(update={"checksum": hashlib.sha256(body).hexdigest()})

    @property
    def text(self) -> str:
        """The one form in which a manifest is written."""
        return self.model_dump_json(indent=2) + "\n"


@dataclass(frozen=True)
class Checkpoint:
    """The verified anchors after `round` rounds, by stage and canonical parameter name."""

    spec: RunSpec
    round: int
    stages: Mapping[int, Parameters]


def write(folder: Path, spec: RunSpec, round: int, stages: Mapping[int, Parameters]) -> None:
    """Write the anchors of `stages` after `round` rounds as the checkpoint `folder`.

    Parents are created. An existing folder is replaced; between the two renames that this takes a reader
    finds no checkpoint, and after a crash between them the next write brings the old one back first.

    Raises:
        HetnodeError: BAD_OPTION where something else than a checkpoint stands at `folder`.
        ValueError: names, dtypes or shapes are not those of the spec.
        OSError: the disk refuses; what stood at `folder` is unchanged.
    """
    _publish(folder, spec, round, stages.items())


def read(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read and verify all stages of a checkpoint, which may be some of the run's.

    Raises:
        HetnodeError: CHECKPOINT_MISSING or CHECKPOINT_CORRUPT.
    """
    spec, manifest = _verify(folder)
    stages = {stage: _load(folder, spec, manifest, stage, device) for stage in sorted(manifest.stages)}
    return Checkpoint(spec, manifest.round, stages)


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a checkpoint whose files verify and which has every stage of its run."""
    try:
        spec, manifest = _verify(folder)
    except HetnodeError:
        return False
    return not _missing(spec, manifest.stages)


def latest(root: Path) -> Path | None:
    """The ``round-NNNNNN`` folder of the highest round below `root` whose files verify, or None."""
    rounds = {
        int(match[1]): path
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := re.fullmatch(r"round-(\d{6,})", path.name))
    }
    for _, path in sorted(rounds.items(), reverse=True):
        try:
            _verify(path)
        except HetnodeError:
            continue
        return path
    return None


def find(place: Path) -> Path:
    """The checkpoint that a person means by `place`: a run folder, a node's folder, or the checkpoint itself.

    It is not verified yet. Where there is none, `place` itself is returned, so that reading it says so.
    """
    for folder in (place, place / "checkpoint"):
        if (folder / _MANIFEST).exists():
            return folder
    return latest(place) or latest(place / "checkpoint") or place


def assemble(parts: Sequence[Path], folder: Path) -> None:
    """Make one complete checkpoint of those that several members wrote after the same round.

    Every part is verified, and stages are copied one at a time. Nothing is written where that fails.

    Raises:
        HetnodeError: BAD_OPTION as :func:`write`; CHECKPOINT_CORRUPT where a part is, or where parts are of
            different runs or rounds; ANCHOR_DIVERGED where two parts hold different parameters of one stage;
            CHECKPOINT_MISSING where a part or a stage is missing.
    """
    verified = {part: _verify(part) for part in parts}
    if not verified:
        raise _missing_error("There are no parts to assemble")
    holder: dict[int, Path] = {}
    first, (spec, reference) = next(iter(verified.items()))
    for part, (_, manifest) in verified.items():
        if (manifest.spec_hash, manifest.round) != (reference.spec_hash, reference.round):
            raise _corrupt(
                part,
                f"it is of run {manifest.run_id} after round {manifest.round}, "
                f"but {first} is of run {reference.run_id} after round {reference.round}",
            )
        for stage, entry in manifest.stages.items():
            other = holder.setdefault(stage, part)
            if verified[other][1].stages[stage].anchor_digest != entry.anchor_digest:
                raise HetnodeError(
                    ErrorCode.ANCHOR_DIVERGED,
                    f"The checkpoints {other} and {part} hold different parameters of stage {stage}.",
                    "Leave out the part of the replica that diverged; the coordinator's log has the digests.",
                )
    if missing := _missing(spec, holder):
        raise _missing_error(f"Of {spec.swarm.stages} stages, no part holds {_listed(missing)}")
    loaded = ((s, _load(holder[s], spec, verified[holder[s]][1], s, "cpu")) for s in sorted(holder))
    _publish(folder, spec, reference.round, loaded)


def require_complete(checkpoint: Checkpoint) -> None:
    """Raise CHECKPOINT_MISSING, naming the stages, unless the checkpoint has every stage of its run."""
    if missing := _missing(checkpoint.spec, checkpoint.stages):
        stages = checkpoint.spec.swarm.stages
        raise _missing_error(f"Of {stages} stages, the checkpoint does not hold {_listed(missing)}")


def _publish(folder: Path, spec: RunSpec, round: int, stages: Iterable[tuple[int, Parameters]]) -> None:
    """Write a checkpoint beside its place, flush it, and move it there. `stages` is drawn one at a time."""
    _require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    partial = _hidden(folder, _PARTIAL)
    partial.mkdir()
    try:
        entries = {stage: _save(partial, spec, stage, parameters) for stage, parameters in stages}
        manifest = Manifest(run_id=spec.run_id, spec_hash=spec.hash, round=round, stages=entries)
        (partial / _SPEC).write_text(spec.canonical_json, encoding="utf-8")
        _flush(partial / _SPEC)
        (partial / _MANIFEST).write_text(manifest.sealed().text, encoding="utf-8")
        _flush(partial / _MANIFEST)
        _flush(partial)
        _move_into_place(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _require_replaceable(folder: Path) -> None:
    """Only a checkpoint, or an empty folder, may be replaced: what else stands there is the user's."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / _MANIFEST).is_file():
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"{folder} exists and is no checkpoint.",
            "Name a folder that does not exist yet; nothing was changed.",
        )


def _move_into_place(partial: Path, folder: Path) -> None:
    replaced = _hidden(folder, _REPLACED)
    if folder.exists():
        folder.rename(replaced)  # a rename cannot take the place of a folder that holds files
    try:
        partial.rename(folder)
    except OSError:
        if replaced.exists():
            replaced.rename(folder)
        raise
    _flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what a writer that crashed left below `parent`, and bring back what it had moved aside."""
    for replaced in parent.glob(f".*{_REPLACED}"):
        folder = parent / replaced.name[1:].removesuffix(_REPLACED)
        if folder.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(folder)
    for partial in parent.glob(f".*{_PARTIAL}"):
        shutil.rmtree(partial)


def _hidden(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save(folder: Path, spec: RunSpec, stage: int, parameters: Parameters) -> StageEntry:
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if shapes != parameter_shapes(spec, stage) or any(t.dtype != torch.float32 for t in parameters.values()):
        raise ValueError(f"the parameters of stage {stage} are not the float32 tensors of the spec")
    ordered = {name: parameters[name].detach().cpu().contiguous() for name in parameter_shapes(spec, stage)}
    path = folder / _file_of(stage)
    save_file(ordered, path)
    _flush(path)
    return StageEntry(
        file=path.name,
        bytes=path.stat().st_size,
        sha256=_sha256(path),
        anchor_digest=anchor_digest(ordered),
    )


def _verify(folder: Path) -> tuple[RunSpec, Manifest]:
    """The spec and the manifest of a checkpoint whose files are as they were written and fit the spec."""
    manifest = _read_manifest(folder)
    spec = _read_spec(folder / _SPEC, manifest)
    for stage, entry in manifest.stages.items():
        if not 0 <= stage < spec.swarm.stages or entry.file != _file_of(stage):
            raise _corrupt(folder / _MANIFEST, f"the run has no stage {stage} in a file {entry.file}")
        _verify_stage(folder / entry.file, entry, parameter_shapes(spec, stage))
    return spec, manifest


def _verify_stage(path: Path, entry: StageEntry, shapes: Mapping[str, tuple[int, ...]]) -> None:
    try:
        if path.stat().st_size != entry.bytes or _sha256(path) != entry.sha256:
            raise _corrupt(path, "its size or hash is not the one in the manifest")
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise _corrupt(path, str(error)) from None
    if found != {name: ("F32", shape) for name, shape in shapes.items()}:
        raise _corrupt(path, "its names, dtypes or shapes are not those of the spec")


def _read_manifest(folder: Path) -> Manifest:
    path = folder / _MANIFEST
    if not path.exists():
        raise _missing_error(f"There is no checkpoint in {folder} (it has no {_MANIFEST})")
    text = _read_small(path)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise _corrupt(path, f"it is no manifest ({error.error_count()} faults)") from None
    if manifest.sealed().text != text:
        raise _corrupt(path, "its checksum does not hold")
    return manifest


def _read_spec(path: Path, manifest: Manifest) -> RunSpec:
    text = _read_small(path)
    if hashlib.sha256(text.encode()).hexdigest() != manifest.spec_hash:
        raise _corrupt(path, "its hash is not the one in the manifest")
    try:
        spec = RunSpec.from_json(text)
    except HetnodeError as error:
        raise _corrupt(path, f"another version of hetnode wrote it ({error.cause.rstrip('.')})") from None
    if spec.hash != manifest.spec_hash:
        raise _corrupt(path, "another version of hetnode wrote it")
    return spec


def _read_small(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_JSON_LIMIT + 1)
        if len(content) > _JSON_LIMIT:
            raise ValueError(f"it is larger than {_JSON_LIMIT} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        raise _corrupt(path, str(error)) from None


def _load(
    folder: Path, spec: RunSpec, manifest: Manifest, stage: int, device: torch.device | str
) -> dict[str, Tensor]:
    """The parameters of a stage whose file is verified, in canonical order."""
    entry = manifest.stages[stage]
    path = folder / entry.file
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            # On the CPU the library maps the file: copy, so that what is verified here stays as it is.
            parameters = {name: file.get_tensor(name).clone() for name in parameter_shapes(spec, stage)}
    except (OSError, SafetensorError) as error:
        raise _corrupt(path, str(error)) from None
    if anchor_digest(parameters) != entry.anchor_digest:
        raise _corrupt(path, "its anchor digest is not the one in the manifest")
    return parameters


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_of(stage: int) -> str:
    return f"stage-{stage:02d}.safetensors"


def _missing(spec: RunSpec, stages: Iterable[int]) -> list[int]:
    return sorted(set(range(spec.swarm.stages)) - set(stages))


def _listed(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _corrupt(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.CHECKPOINT_CORRUPT,
        f"The checkpoint {path} cannot be used: {why}.",
        "Use an older checkpoint, or fetch this one again from another member.",
    )


def _missing_error(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.CHECKPOINT_MISSING,
        f"{cause}.",
        "Name a folder that a run has written, or assemble the checkpoints of members that cover all stages.",
    )
