"""Files of a checkpoint: tensors with a hash, JSON with a checksum, folders written as a whole.

A safetensors file has its tensors, all float32, in ascending order of their names and without gaps. So the
data section of a stage's file is the byte stream of protocol.math.digest, and a donor can serve it in
chunks without reading the whole file.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.checkpoint import snapshot_codec
from node.checkpoint.durable import flush
from node.ranks.remote_tensors import RemoteTensor
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import size_of
from protocol.math.outer_step import tensor_bytes
from protocol.trust.private_file import FULL_DISK
from protocol.wire.record_codec import Bounds, RecordCodec

Parameters = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

T = TypeVar("T")
_JSON_LIMIT = 2**20
_CHECKSUM = "checksum"
_PARTIAL = ".hetnode-partial"
_REPLACED = ".hetnode-replaced"


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NotNegative = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class FileEntry:
    """Name, size and hash of a file."""

    file: str
    bytes: NotNegative
    sha256: Sha256


class SealedFile(Generic[T]):
    """The form of a JSON file with one record of type T, whose checksum covers all fields."""

    def __init__(self, kind: type[T]) -> None:
        self._codec = RecordCodec[T](kind, Bounds(_JSON_LIMIT), names={"round_number": "round"})

    def write(self, path: Path, record: T) -> None:
        """Write and flush the file. Raises OSError."""
        write_text(path, _sealed(json.loads(self._codec.encode(record))))

    def checksum(self, record: T) -> str:
        """The checksum in the file with `record`, hex."""
        return _checksum(json.loads(self._codec.encode(record)))

    def read(self, path: Path) -> T:
        """The record in `path`, verified by its checksum. Raises CHECKPOINT_CORRUPT."""
        text = read_text(path)
        try:
            tree = json.loads(text)
            if not isinstance(tree, dict) or _sealed(tree) != text:
                raise ValueError("its checksum is wrong")
            return self._codec.read(json.dumps({name: tree[name] for name in tree if name != _CHECKSUM}))
        except (ValueError, RecursionError) as error:
            raise corrupt(path, str(error)) from None


def _sealed(tree: Mapping[str, Any]) -> str:
    """The only valid text of a file with the fields of `tree`; readers compare it byte by byte."""
    fields = {name: tree[name] for name in tree if name != _CHECKSUM}
    return json.dumps({_CHECKSUM: _checksum(fields), **fields}, indent=2, ensure_ascii=False) + "\n"


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Parameters) -> FileEntry:
    """Write `tensors`, float32 on any device, and flush them to the disk.

    The library's writer is not used: it reports a full disk only in a text, and needs all tensors on the CPU.

    Raises OSError, also for a full disk; ValueError for another dtype.
    """
    header: dict[str, object] = {}
    end = 0
    for name in sorted(tensors):
        shape = list(tensors[name].shape)
        start, end = end, end + size_of({name: shape})
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header with spaces, so that the data starts at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    # Hash while writing: reading the file again would take as long as writing it.
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            _write_all(file.fileno(), memoryview(piece))
            digest.update(piece)
        for name in header:
            piece_of_name = tensor_bytes(name, tensors[name])
            _write_all(file.fileno(), piece_of_name)
            digest.update(piece_of_name)
        os.fsync(file.fileno())
    return FileEntry(file=path.name, bytes=8 + len(text) + end, sha256=digest.hexdigest())


def verify_tensors(path: Path, entry: FileEntry, shapes: Shapes) -> None:
    """Raise CHECKPOINT_CORRUPT unless size, hash, names, float32 dtype and shapes are as given."""
    try:
        if path.stat().st_size != entry.bytes or _sha256(path) != entry.sha256:
            raise corrupt(path, "its size or hash differs from the manifest")
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise corrupt(path, str(error)) from None
    if found != {name: ("F32", shape) for name, shape in shapes.items()}:
        raise corrupt(path, "its names, dtypes or shapes differ from the spec")


def stored_tensors(path: Path, shapes: Shapes, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of a verified file, in the order of `shapes`. Each is read when it is used, every time.

    `detach` of an entry reads it, as a tensor of the caller's own, and raises CHECKPOINT_CORRUPT.
    """

    def read(name: str) -> Tensor:
        try:
            # The library maps the file: opened anew, no more than this tensor of it stays in memory.
            with safe_open(path, framework="pt", device=str(device)) as file:
                found: Tensor = file.get_tensor(name)
                return found.clone()
        except (OSError, SafetensorError) as error:
            raise corrupt(path, str(error)) from None

    return {
        name: RemoteTensor.read_by(shape, functools.partial(read, name)) for name, shape in shapes.items()
    }


def read_part(file: Path, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors of one part in a file with its bytes, in their order. Each is read when it is used.

    Raises HetnodeError CHECKPOINT_CORRUPT, and so does `detach` of an entry, which reads it.
    """
    try:
        size = file.stat().st_size
        if size != size_of(shapes):
            raise ValueError(f"it has {size} bytes, not {size_of(shapes)}")
    except (OSError, ValueError) as error:
        raise _unusable(file, error) from None

    def read(shape: tuple[int, ...], offset: int) -> Tensor:
        try:
            # "<f4": the bytes are little-endian on every machine.
            values = np.fromfile(file, "<f4", math.prod(shape), offset=offset).astype(np.float32, copy=False)
            return torch.from_numpy(values).view(shape)
        except (OSError, ValueError, RuntimeError) as error:
            raise _unusable(file, error) from None

    found, offset = {}, 0
    for name in sorted(shapes):
        found[name] = RemoteTensor.read_by(shapes[name], functools.partial(read, shapes[name], offset))
        offset += size_of({name: shapes[name]})
    return found


def _unusable(file: Path, error: Exception) -> HetnodeError:
    return HetnodeError(
        ErrorCode.CHECKPOINT_CORRUPT,
        f"The part of a checkpoint in {file} cannot be used: {error}.",
        "Remove the file; the node downloads the part again.",
    )


def read_snapshot(file: Path, digest: str, shape: tuple[int, int]) -> Tensor:
    """The snapshot of the embedding [V, d], bfloat16, in a file that has this digest.

    Raises HetnodeError CHECKPOINT_CORRUPT.
    """
    try:
        size, expected = file.stat().st_size, snapshot_codec.nbytes_of(*shape)
        if size != expected:
            raise ValueError(f"it has {size} bytes, not {expected}")
        data = file.read_bytes()
        if snapshot_codec.snapshot_digest(data, *shape) != digest:
            raise ValueError("its digest is another one")
        return snapshot_codec.decode(data, *shape)
    except (OSError, ValueError, HetnodeError) as error:
        raise HetnodeError(
            ErrorCode.CHECKPOINT_CORRUPT,
            f"The snapshot of the embedding in {file} cannot be used: {error}.",
            "Remove the file; the node downloads the snapshot again.",
        ) from None


def write_text(path: Path, text: str) -> None:
    """Write and flush a small text. Raises OSError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write and flush a small file. Raises OSError."""
    path.write_bytes(content)
    flush(path)


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file. Raises OSError, and ValueError for more than `most` bytes."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return content


def read_text(path: Path) -> str:
    """The text of a small file. Raises CHECKPOINT_CORRUPT."""
    try:
        return read_bytes(path, _JSON_LIMIT).decode()
    except (OSError, ValueError) as error:
        raise corrupt(path, str(error)) from None


def publish(folder: Path, fill: Callable[[Path], None], series: str = "") -> None:
    """Call `fill` to write into a hidden folder beside `folder`, flush it, and rename it to `folder`.

    After a crash the hidden folder may remain, but `folder` is never incomplete. The next call for the same
    folder removes the hidden one. Only one process at a time may publish a folder, or a series of folders.

    `series` is a glob of folder names below the same parent that only this process writes; "" means `folder`
    only. Hidden folders that a crash has left for any of these names are removed, too.

    Raises HetnodeError DISK_FULL, or OSError for another disk error; earlier files are unchanged and the
    hidden folder is removed.
    """
    partial = _hidden(folder, _PARTIAL)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent, series or glob.escape(folder.name))
        try:
            partial.mkdir()
            fill(partial)
            # A file survives a power failure only if the folders that list it are flushed, too.
            for place in sorted({path.parent for path in partial.rglob("*")}, reverse=True):
                flush(place)
            _move_into_place(partial, folder)
        except BaseException:  # also a KeyboardInterrupt must free the space
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise HetnodeError(
            ErrorCode.DISK_FULL,
            f"Writing {folder} failed: {error.strerror}.",
            "Free some disk space; earlier files are unchanged.",
        ) from None


def _move_into_place(partial: Path, folder: Path) -> None:
    replaced = _hidden(folder, _REPLACED)
    if folder.exists():
        folder.rename(replaced)  # a rename cannot replace a folder that has files
    try:
        partial.rename(folder)
    except OSError:
        if replaced.exists():
            replaced.rename(folder)
        raise
    flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sweep(parent: Path, names: str) -> None:
    """After a crash of a writer of `names`: restore replaced folders, remove partial ones."""
    for replaced in parent.glob(f".{names}{_REPLACED}"):
        folder = parent / replaced.name[1:].removesuffix(_REPLACED)
        if folder.exists():
            # The crash came after the second rename, so the new folder is complete.
            shutil.rmtree(replaced)
        else:
            replaced.rename(folder)
    for partial in parent.glob(f".{names}{_PARTIAL}"):
        shutil.rmtree(partial)


def _hidden(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def corrupt(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.CHECKPOINT_CORRUPT,
        f"The checkpoint {path} cannot be used: {why}.",
        "Use an older checkpoint, or download this one again from another member.",
    )


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        # One call may write only a part, for example at most 2 GiB on Linux.
        data = data[os.write(descriptor, data) :]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
