"""A machine's memory: whether stages fit, and what becomes of freed tensors.

What stages need is compared before anything of theirs is allocated: somebody else wrote the specification.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from node.ipc.worker_calls import ComputeOptions
from protocol.errors import ErrorCode, HetnodeError
from protocol.memory.needs import MemoryNeed, layer_activations
from protocol.spec.run import RunSpec
from protocol.types import StageRange

_SCALAR = 4
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_REMEDY = "Give the node more memory; or --role stage or auto: then the coordinator chooses stages that fit."


def hold_to_limit(options: ComputeOptions) -> None:
    """Hold torch to the memory limit where it can be held."""
    if not options.memory_limit:
        return
    if (device := torch.device(options.device)).type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_limit / total), device)
    elif device.type == "mps":
        most = torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(min(1.0, options.memory_limit / most))


def require_need(
    stages: StageRange, need: MemoryNeed, options: ComputeOptions, free: float, main: float
) -> None:
    """Raises HetnodeError BAD_OPTION above the memory limit, DEVICE_UNAVAILABLE where so much is not free.

    `free` is that of the device, and `main` that of the machine.
    """
    what = f"Stages {stages} of this run need at least"
    if options.memory_limit and need.device > options.memory_limit:
        limit = f"--memory-limit {options.memory_limit / 1e9:g}"
        raise HetnodeError(
            ErrorCode.BAD_OPTION, f"{what} {need.device / 1e9:.3g} GB, above {limit}.", _REMEDY
        )
    require_room(what, need.device, free, options.device)
    require_room(what, need.main, main, "this machine")


def layers_bytes(spec: RunSpec) -> float:
    """Bytes that a microbatch through the layers of stage 0 needs at least, forward and backward."""
    layers = len(spec.layers_of(0))
    return 2 * _SCALAR * layers * spec.model.layer_parameters + layer_activations(spec)


def require_room(what: str, needed: float, free: float, device: str) -> None:
    """Raises HetnodeError DEVICE_UNAVAILABLE where `free` bytes are less than the `needed` ones."""
    if needed > free:
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"{what} {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free on {device}.",
            _REMEDY,
        )


def keep_freed_tensors(keeps: bool) -> None:
    """Let the C library of Linux keep freed tensors of up to 32 MB for the next ones, or return them.

    The steps of a phase allocate the same sizes again and again, and are a fifth faster if it `keeps` them.
    What an exchange allocates stays: between kept memory it leaves holes, more with each round. Nothing
    happens where the C library is another one.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.mallopt(_MMAP_THRESHOLD, 2**25 if keeps else 2**17)
        if not keeps:
            library.malloc_trim(0)
