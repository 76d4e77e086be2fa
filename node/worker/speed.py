"""Measures how fast a device trains the layers of a run, and how much memory is free on it."""

from __future__ import annotations

import time
from statistics import median

import torch

from node.model.llama import Block, block_shapes, rotary_tables
from node.worker.compute import Compute
from protocol.algorithm.flops import layer_flops
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec

_MOST_MICROBATCHES = 1000


def free_memory(compute: Compute) -> int:
    """Free bytes on the device of `compute`. 0 for a device without separate memory, such as a CPU.

    Raises HetnodeError DEVICE_UNAVAILABLE if the device cannot compute in this way.
    """
    opened = compute.open()
    return int(torch.cuda.mem_get_info(opened)[0]) if opened.type == "cuda" else 0


def layer_speed(spec: RunSpec, device: str, seconds: float) -> float:
    """Training speed in operations per second (protocol.algorithm.flops), measured for about `seconds`.

    Runs forward and backward passes of microbatches of the run's size, with random weights and inputs,
    through the layers of stage 0 without embedding and head. The first pass is not counted. At least one pass
    is measured, even if it takes longer than `seconds`.

    Raises HetnodeError DEVICE_UNAVAILABLE if the device cannot do this, for example for lack of memory.
    """
    compute = Compute(device)
    opened = compute.open()
    try:
        return _measured(spec, compute, opened, seconds)
    except (RuntimeError, MemoryError) as error:  # torch raises either one if memory is short
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"The layers of a stage cannot be trained on '{device}': {_first_line(error)}.",
            "Free memory on it, or use another --device.",
        ) from None


def _measured(spec: RunSpec, compute: Compute, device: torch.device, seconds: float) -> float:
    model = spec.model
    generator = torch.Generator().manual_seed(0)

    def block() -> Block:
        shapes = block_shapes(model).items()
        return Block(model, {name: torch.empty(shape).uniform_(-0.03, 0.03) for name, shape in shapes})

    blocks = [block().to(device) for _ in spec.layers_of(0)]
    tables = rotary_tables(model.context, model.head_width, model.rope_base, torch.float32, device)
    size = (spec.inner.microbatch_size, model.context, model.width)
    x_bld = torch.randn(size, generator=generator).to(device).requires_grad_()
    gradient_bld = torch.randn(size, generator=generator).to(device)
    took: list[float] = []
    for number in range(_MOST_MICROBATCHES):
        began = _clock(device)
        with compute.autocast():
            output_bld = x_bld
            for each in blocks:
                output_bld = each(output_bld, *tables)
        torch.autograd.backward(output_bld, gradient_bld.to(output_bld.dtype))
        elapsed = _clock(device) - began
        if number > 0:  # the first pass includes one-time costs, such as memory allocation
            took.append(elapsed)
        if took and sum(took) >= seconds:
            break
    # The median ignores passes that another program has slowed down.
    return layer_flops(spec, len(blocks)) / median(took)


def _first_line(error: Exception) -> str:
    """First line of the message of `error`, or its type name: a MemoryError may have no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _clock(device: torch.device) -> float:
    """The time after the device has finished all its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
