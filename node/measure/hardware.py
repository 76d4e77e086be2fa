"""What this machine offers: device, memory and threads, as published by the node."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import psutil

from protocol.types import Capacity


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


def measure_capacity(device: str, threads: int) -> Capacity:
    """The capacity of a node that computes on `device` with `threads` threads.

    Memory is what is free in the machine now, in bytes.
    """
    return Capacity(device=device, memory_bytes=psutil.virtual_memory().available, threads=threads)
