"""The device on which a member computes."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from node.core.worker.compute import Compute, chosen_precision
from node.ipc.worker_calls import AUTO_DEVICE, DeviceInfo
from protocol.errors import HetnodeError

log = logging.getLogger(__name__)


def check_device(compute: Compute) -> DeviceInfo:
    """What `compute` computes on. In place of AUTO_DEVICE: the first of cuda, mps and cpu that works.

    Raises HetnodeError DEVICE_UNAVAILABLE.
    """
    candidates = [compute.device]
    if compute.device == AUTO_DEVICE:
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        candidates = [name for name, is_there in found.items() if is_there]
    for name in candidates[:-1]:
        try:
            return _described(replace(compute, device=name))
        except (HetnodeError, RuntimeError) as error:
            log.warning("%s is not used: %s", name, error)
    return _described(replace(compute, device=candidates[-1]))


def gpu_name(device: torch.device) -> str:
    """What the GPU is called; with a build of torch for AMD, which calls them cuda, also its ROCm."""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is None:
        return name
    architecture = torch.cuda.get_device_properties(device).gcnArchName
    return f"{name or architecture}, ROCm {torch.version.hip}"  # a driver may know no name


def _described(compute: Compute) -> DeviceInfo:
    device = compute.open()
    name, free_bytes = compute.device, 0
    if device.type == "cuda":
        name = f"{name} ({gpu_name(device)})"
        free_bytes = torch.cuda.mem_get_info(device)[0]
    elif device.type == "mps":
        free_bytes = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return DeviceInfo(compute.device, name, chosen_precision(device, compute.precision), int(free_bytes))
