"""How fast the device of this process trains the layers of a run, and how much memory is free on it."""

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
    """Bytes free on the device of `compute` now; 0 where its memory is the machine's own.

    Raises HetnodeError DEVICE_UNAVAILABLE where it cannot compute in that way.
    """
    opened = compute.open()
    return int(torch.cuda.mem_get_info(opened)[0]) if opened.type == "cuda" else 0


def layer_speed(spec: RunSpec, device: str, seconds: float) -> float:
    """Operations per second (protocol.algorithm.flops) in training the layers of a stage for `seconds`.

    Forward and backward passes of microbatches of the run's size, with arbitrary weights and inputs, through
    the layers of the first stage, without embedding and head. At least one is measured, however long it
    takes; the first is left aside.

    Raises HetnodeError DEVICE_UNAVAILABLE where the device cannot, such as for want of memory.
    """
    compute = Compute(device)
    opened = compute.open()
    try:
        return _measured(spec, compute, opened, seconds)
    except (RuntimeError, MemoryError) as error:  # torch says in both ways that memory is too short
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"The layers of a stage cannot be trained on '{device}': {_first_line(error)}.",
            "Free its memory, or take another --device.",
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
        if number > 0:
            took.append(elapsed)
        if took and sum(took) >= seconds:
            break
    return layer_flops(spec, len(blocks)) / median(took)


def _first_line(error: Exception) -> str:
    """What `error` says, or else its name: a MemoryError may say nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _clock(device: torch.device) -> float:
    """Now, when all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
