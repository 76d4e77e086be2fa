"""Copies from main memory to a device. On CUDA they go through pinned memory, and the caller does not wait.

The device's copy engine reads pinned memory by itself, in the order of the current stream: the CPU prepares
the next block or kernel meanwhile. torch keeps a pinned block until its copy has been done. From other
memory, torch waits for all that the device has queued.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 2**22
"""Elements of one pinned block: whole parameters would pin gigabytes."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. The caller may change `tensor` afterwards, if it is not on `device` already."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)``, of equal shapes, without gradients. `source` may change afterwards."""
    target = target.detach()
    if target.device.type != "cuda" or source.device.type != "cpu" or not target.is_contiguous():
        target.copy_(source)
        return
    for there, here in zip(
        *(torch.split(each.reshape(-1), _BLOCK) for each in (target, source)), strict=True
    ):
        there.copy_(here.pin_memory(), non_blocking=True)
