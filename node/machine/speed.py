"""Measures how fast a device trains the layers of a run."""

from __future__ import annotations

import time
from statistics import median

import torch

from node.core.model.llama import LlamaBlock, rotary_tables
from node.core.model.shapes import block_shapes
from node.core.model.stage import backward_from
from node.core.worker.compute import Compute, device_unavailable
from protocol.math.flops import layer_flops
from protocol.spec.run import RunSpec

_MOST_MICROBATCHES = 1000


def layer_speed(spec: RunSpec, compute: Compute, seconds: float) -> float:
    """Training speed in operations per second (protocol.math.flops), measured for about `seconds`.

    Passes random microbatches forward and backward through the layers of stage 0, with random weights,
    without embedding and head. At least one pass is measured, even if it takes longer than `seconds`.

    Raises HetnodeError DEVICE_UNAVAILABLE if the device cannot do this, for example for lack of memory.
    """
    opened = compute.open()
    try:
        return _measured(spec, compute, opened, seconds)
    except (RuntimeError, MemoryError) as error:  # torch raises either one if memory is short
        what = f"The layers of a stage cannot be trained on '{compute.device}'"
        raise device_unavailable(what, error, "Free memory on it, or use another --device.") from None


def _measured(spec: RunSpec, compute: Compute, device: torch.device, seconds: float) -> float:
    model, shapes = spec.model, block_shapes(spec.model)
    generator = torch.Generator().manual_seed(0)
    blocks = [
        LlamaBlock(model, {name: torch.empty(shapes[name]).uniform_(-0.03, 0.03) for name in shapes}).to(
            device
        )
        for _ in spec.layers_of(0)
    ]
    tables = rotary_tables(model, model.context, torch.float32, device)
    size = (spec.inner.microbatch_size, model.context, model.width)
    x_bld = torch.randn(size, generator=generator).to(device).requires_grad_()
    gradient_bld = torch.randn(size, generator=generator).to(device)
    took: list[float] = []
    for microbatch in range(_MOST_MICROBATCHES):
        began = _clock(device)
        with compute.autocast():
            output_bld = x_bld
            for each in blocks:
                output_bld = each(output_bld, *tables)
        backward_from(output_bld, gradient_bld.to(output_bld.dtype))
        elapsed = _clock(device) - began
        if microbatch > 0:  # the first pass includes one-time costs, such as memory allocation
            took.append(elapsed)
        if took and sum(took) >= seconds:
            break
    # The median ignores passes that another program has slowed down.
    return layer_flops(spec, len(blocks)) / median(took)


def _clock(device: torch.device) -> float:
    """The time after the device has finished all its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
