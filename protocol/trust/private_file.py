"""Files with secrets: only their owner can read them, at every moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace the file at `path` as a whole. Its mode is 0600 before it has any byte. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    # O_EXCL refuses a file or link that another user has put here since.
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        # Before the rename: a power failure must not leave an empty file under the final name.
        os.fsync(file.fileno())
    new.replace(path)
