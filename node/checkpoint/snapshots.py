"""The snapshots of the token embedding on this node's disk.

A snapshot is one file whose name has its round and its digest, so that a reader can verify it after a
restart, when nobody else remembers the digest. The file has the bytes of :mod:`.snapshot_codec`
and nothing else: a donor serves it as it is. The main process imports this module, so it avoids torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from node.checkpoint.durable import flush
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.private_file import FULL_DISK

_FOLDER = "snapshots"
_PARTIAL = ".hetnode-partial"


@dataclass(frozen=True)
class StoredSnapshot:
    """A file with the snapshot of one round. `digest` is that of its name; its bytes are not verified."""

    round_number: int
    digest: str
    path: Path


def held(folder: Path) -> dict[int, StoredSnapshot]:
    """The snapshots below `folder`, that of this node's checkpoints, by round in ascending order."""
    place = folder / _FOLDER
    found = (_of(path) for path in (place.iterdir() if place.is_dir() else ()))
    return {
        each.round_number: each
        for each in sorted(filter(None, found), key=lambda each: (each.round_number, each.digest))
    }


def path_of(folder: Path, round_number: int, digest: str) -> Path:
    """Where the snapshot with this digest belongs."""
    return folder / _FOLDER / f"round-{round_number:06d}-{digest}"


def write(folder: Path, round_number: int, digest: str, data: bytes) -> Path:
    """Keep the bytes of a snapshot in place of any other of its round. A crash leaves no part of a file.

    Raises HetnodeError DISK_FULL, or OSError for another disk error; the snapshots before are unchanged.
    """
    partial = folder / _FOLDER / _PARTIAL
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        flush(partial)
        return adopt(folder, round_number, digest, partial)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno not in FULL_DISK:
            raise
        raise HetnodeError(
            ErrorCode.DISK_FULL,
            f"Writing {partial.parent} failed: {error.strerror}.",
            "Free some disk space; earlier files are unchanged.",
        ) from None


def adopt(folder: Path, round_number: int, digest: str, file: Path) -> Path:
    """Move a verified file, on the same disk, to where it replaces any other of its round. Raises OSError."""
    path = path_of(folder, round_number, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, path)
    for other in path.parent.glob(f"round-{round_number:06d}-*"):
        if other != path:
            other.unlink()
    flush(path.parent)
    return path


def prune(folder: Path, needed: Collection[int]) -> None:
    """Remove the snapshots of other rounds than those `needed`. Raises OSError."""
    for round_number, each in held(folder).items():
        if round_number not in needed:
            each.path.unlink(missing_ok=True)


def _of(path: Path) -> StoredSnapshot | None:
    match = re.fullmatch(r"round-(\d{6,})-([0-9a-f]{64})", path.name)
    return StoredSnapshot(int(match[1]), match[2], path) if match else None
