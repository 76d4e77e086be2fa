"""How trials are computed on this machine: nothing of it belongs to what a trial is."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from node.measure import hardware


class ComputeOptions(BaseModel):
    """How a machine computes a trial; no part of the trial's specification."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = "cpu"
    threads: int = Field(0, ge=0, description="of every worker process; 0 shares the cores among them")
    jobs: int = Field(1, ge=1, le=256, description="worker processes, each with one trial at a time")
    compile: bool = Field(False, description="torch.compile")
    activation_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    resident: int = Field(
        0,
        ge=0,
        description="replicas in the device's memory at a time, 0: all; the others wait in main memory, or "
        "beside the trial's saved state where the device has no other",
    )
    save_every: int = Field(
        0, ge=0, description="rounds between two saved states; 0: by time, at most 5 % of it"
    )


def device_name(options: ComputeOptions) -> str:
    """A description of the device for people: without host names and paths."""
    if options.device.startswith("cuda"):
        import torch  # noqa: PLC0415 - only where a trial is computed

        return torch.cuda.get_device_name(options.device)
    threads = options.threads
    return f"{hardware.processor()}, {threads} thread{'s' * (threads != 1)} of {os.cpu_count()}"
