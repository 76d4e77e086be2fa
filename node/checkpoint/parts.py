"""The parts of a checkpoint on disk that a donor serves: the bytes of protocol.math.digest.

The files are those of node.checkpoint.global_model. For the embedding, a part is the tensor "emb" and the
state of its outer optimizer in the tensors "emb/...". The data section of a file has the tensors in ascending
order of their names and without gaps, because a digest covers exactly these bytes. The header is read to
verify this. A snapshot of the embedding has a file of its own. Only one piece of a part is in memory at a
time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from node.checkpoint import snapshots
from node.checkpoint.layout import EMBEDDING_FILE, EMBEDDING_TENSOR, round_folder, rounds_below, stage_file
from protocol.math.digest import chunk_count, chunk_range
from protocol.types import Part

log = logging.getLogger(__name__)

_LENGTH_BYTES = 8
_HEADER_LIMIT = 1 << 20
MOST_ROUNDS = 64


@dataclass(frozen=True)
class StoredPart:
    """File, offset and size of a part. `version` changes if the file is written again."""

    path: Path
    offset: int
    nbytes: int
    version: tuple[int, int]


def find(folder: Path, stage: int, part: Part, round_number: int) -> StoredPart | None:
    """The part after `round_number` from the files below `folder`; None if there is no usable one."""
    checkpoint = folder / round_folder(round_number)
    whole = checkpoint / stage_file(stage)
    if part is Part.STAGE:
        return _open(whole)
    if stage != 0 or part is Part.COPY:
        return None
    if part is Part.SNAPSHOT:
        kept = snapshots.held(folder).get(round_number)
        return None if kept is None else _open_bytes(kept.path)
    # A host of stage 0 has the embedding in the middle of that stage's file.
    return _open(whole, EMBEDDING_TENSOR) or _open(checkpoint / EMBEDDING_FILE, EMBEDDING_TENSOR)


def rounds_with(folder: Path, stages: Iterable[int], embedding: bool = True) -> tuple[int, ...]:
    """The newest rounds below `folder`, at most MOST_ROUNDS, whose checkpoints have `stages`.

    And TE, if `embedding`.
    """
    wanted = [(stage, Part.STAGE) for stage in stages]
    if embedding:
        wanted.append((0, Part.EMBEDDING))
    found = (each for each in rounds_below(folder) if all(find(folder, *part, each) for part in wanted))
    return tuple(islice(found, MOST_ROUNDS))


def pieces(part: StoredPart, wanted: range, size: int) -> Iterator[bytes]:
    """The bytes `wanted` of `part`, at most `size` at a time. OSError if the file does not have them.

    The file stays open while the pieces are read, so it may be removed or replaced during that time.
    """
    with part.path.open("rb") as file:
        if _version(file.fileno()) != part.version:
            raise OSError(f"{part.path} was written again")
        file.seek(part.offset + wanted.start)
        for start in range(wanted.start, wanted.stop, size):
            piece = file.read(min(size, wanted.stop - start))
            if len(piece) < min(size, wanted.stop - start):
                raise OSError(f"{part.path} is too short")
            yield piece


def chunk_hashes(part: StoredPart) -> bytes:
    """The concatenated sha-256 of every chunk. Reads the whole part. OSError if the file is too short."""
    hashes = []
    for index in range(chunk_count(part.nbytes)):
        digest = hashlib.sha256()
        for piece in pieces(part, chunk_range(part.nbytes, index), 1 << 20):
            digest.update(piece)
        hashes.append(digest.digest())
    return b"".join(hashes)


def _open(path: Path, tensor: str | None = None) -> StoredPart | None:
    """The whole data section of a file, or the range of one parameter and its optimizer state."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _HEADER_LIMIT:  # a damaged length must not allocate much memory
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            data = os.fstat(file.fileno()).st_size - _LENGTH_BYTES - length
            offsets = _offsets(header, data)
            version = _version(file.fileno())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("%s cannot be served: %s", path, error)
        return None
    start, stop = 0, data
    if tensor is not None:
        # In ascending order a parameter's optimizer state follows it, so both are one range of bytes.
        wanted = [each for name, each in offsets.items() if name.partition("/")[0] == tensor]
        if not wanted:
            return None
        start, stop = wanted[0][0], wanted[-1][1]
    return StoredPart(path, _LENGTH_BYTES + length + start, stop - start, version)


def _open_bytes(path: Path) -> StoredPart | None:
    """A file that is a part as it is."""
    try:
        with path.open("rb") as file:
            return StoredPart(path, 0, os.fstat(file.fileno()).st_size, _version(file.fileno()))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be served: %s", path, error)
        return None


def _offsets(header: object, data: int) -> dict[str, tuple[int, int]]:
    """Start and end of each tensor. ValueError unless they are float32, in order, and without gaps."""
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    offsets, end = {}, 0
    for name in sorted(set(header) - {"__metadata__"}):
        entry = header[name]
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"the tensor {name} has no valid shape or offsets")
        if entry["dtype"] != "F32" or start != end or stop != start + 4 * math.prod(shape):
            raise ValueError(f"the tensor {name} is not float32, or does not follow the tensor before it")
        offsets[name], end = (start, stop), stop
    if end != data:
        raise ValueError(f"it has {data} bytes of data, but the header describes {end}")
    return offsets


def _version(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_mtime_ns
