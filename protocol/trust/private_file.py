"""Small files that are replaced as a whole: a crash or a full disk leaves the old content or the new one.

Files with secrets can be read by their owner alone, at every moment.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from protocol.errors import ErrorCode, HetnodeError

FULL_DISK = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The errors of a disk that takes no more bytes."""


def write_private(path: Path, data: bytes) -> None:
    """As :func:`write_whole`; the mode of the file is 0600 before it has any byte."""
    write_whole(path, data, 0o600)


def write_whole(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Replace the file at `path` as a whole. Raises OSError; then the file is as it was."""
    new = path.with_name(f"{path.name}.new")
    # O_EXCL refuses a file or link that another user has put here since.
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            # Before the rename: a power failure must not leave an empty file under the final name.
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def without_locks(place: Path, error: OSError) -> HetnodeError:
    """The error of a file system that knows no locks, such as a share of the network."""
    return HetnodeError(
        ErrorCode.BAD_OPTION,
        f"{place} cannot be locked: {error.strerror or error}.",
        "Name a folder on a disk of this machine.",
    )
