"""Resident memory of a process that measures alone: what the benchmarks of memory share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.tables import NotHere

CLEAR = Path("/proc/self/clear_refs")
"""Writing "5" begins a new peak, on Linux alone."""
LAYER = 12_453_888
"""Parameters of a layer of the 178m preset, of which stages of any size are made."""
_RETURNING = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""One arena that returns free memory at once: then resident memory is the memory in use."""


def layers_of(parameters: int) -> int:
    """How many layers together have about this number of `parameters`; at least 1."""
    return max(1, round(parameters / LAYER))


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def printed_alone(module: str, **options: object) -> str:
    """What ``python -m MODULE --OPTION VALUE ...`` prints in a process that returns free memory at once.

    Raises NotHere where no peak of memory can be begun.
    """
    if not CLEAR.exists():
        raise NotHere("only Linux tells the peak of a process from a moment on")
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", module, *given]
    environment = os.environ | _RETURNING
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
