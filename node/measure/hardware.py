"""What this machine offers: device, memory and threads, as published by the node."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from protocol.types import Capacity

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_BESIDE_STAGES = 512 << 20
"""Bytes for the processes of a node, of which the worker has torch and others the transport."""


def available_threads() -> int:
    """CPU threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Name of the CPU, for people."""
    described = Path("/proc/cpuinfo")
    if described.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", described.read_text(encoding="utf-8"), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def free_memory(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Bytes of main memory that this node can give to its stages, at least 1.

    What is free on the machine and in each cgroup of this process, as of a container, whose limit the machine
    does not show; less what the processes of the node need beside the stages. `cgroups` is where the control
    groups are mounted, and `own` names those of this process.
    """
    free = [psutil.virtual_memory().available, *_free_in_cgroups(cgroups, own)]
    return max(1, min(free) - _BESIDE_STAGES)


def _free_in_cgroups(cgroups: Path, own: Path) -> Iterator[int]:
    """Bytes free in each memory cgroup that has a limit; page cache that is not in use counts as free."""
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers == "":
            root, files = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # A limit of any parent binds, too. In a container the own path may not be visible.
        inner = root / name.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            if (free := _free_in(folder, *files)) is not None:
                yield free


def _free_in(folder: Path, limit: str, usage: str, inactive: str) -> int | None:
    """Bytes free in the cgroup of `folder`; None if it has no limit or cannot be read."""
    try:
        most, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit, usage))
        statistics = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # "max" is no number
        return None
    cached = re.search(rf"^{inactive} (\d+)$", statistics, re.MULTILINE)
    return most - used + (int(cached[1]) if cached else 0)


def measure_capacity(device: str, threads: int, device_bytes: int = 0) -> Capacity:
    """The capacity of this machine. `device_bytes` are those that a GPU can still take; 0 for a CPU."""
    main = free_memory()
    memory = device_bytes or main
    if device.startswith("mps"):  # it takes them from the memory of the machine
        memory = min(memory, main)
    return Capacity(device=device, memory_bytes=memory, threads=threads, main_bytes=main)
