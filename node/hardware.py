"""What this machine offers: device, memory and threads, as published by the node."""

from __future__ import annotations

import os

import psutil

from protocol.types import Capacity


def available_threads() -> int:
    """CPU threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_capacity(device: str, threads: int) -> Capacity:
    """The capacity of a node that computes on `device` with `threads` threads.

    Memory is what is free in the machine now, in bytes.
    """
    return Capacity(device=device, memory_bytes=psutil.virtual_memory().available, threads=threads)
