"""Files that survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Return when the disk has the content of a file, or the entries of a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
