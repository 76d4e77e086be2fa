"""The speed of a full replica on a GPU, and its model FLOPs utilization (MFU).

    python -m benchmarks.mfu                                     # preset 1b on cuda, bf16
    python -m benchmarks.mfu --compile --microbatch-size 8
    python -m benchmarks.mfu --preset 178m --peak-tflops 165     # a GPU that is not in the table

MFU is the share of the GPU's peak speed that goes into the operations of the model: 6 per weight of a matrix
and token, and attention over the whole context (protocol.math.flops). The peak is that of dense bf16
matrix products, as the vendor states it. Recomputation does not count.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

import torch

from benchmarks.inner_loop import replica_step, timed
from benchmarks.tables import NotHere, Table, machine
from node.core.worker.compute import Compute
from node.ipc.worker_calls import Precision
from protocol.math.flops import microbatch_flops, tokens_of_microbatch
from protocol.run_files.presets import PRESETS
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "A10": 125.0}
"""Dense bf16, by a part of the device's name; the first one that fits."""
_WARM_UP = 2


def peak_tflops(name: str) -> float | None:
    """Of the GPU called `name`; None if it is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def utilization(spec: RunSpec, step_seconds: float, tflops: float) -> float:
    """MFU of a full replica whose inner step takes `step_seconds`, on a device of that peak."""
    flops = microbatch_flops(spec, range(spec.swarm.stages)) * spec.inner.microbatches
    return flops / step_seconds / (tflops * 1e12)


def measured(spec: RunSpec, compute: Compute, steps: int, tflops: float | None) -> Table:
    """The median of `steps` inner steps. Raises NotHere without a GPU."""
    if not torch.cuda.is_available():
        raise NotHere("needs a CUDA device")
    device = torch.cuda.get_device_name(compute.device)
    tflops = tflops or peak_tflops(device)
    torch.cuda.reset_peak_memory_stats(compute.device)
    step = replica_step(spec, compute)
    seconds = [timed(step, compute.device).wall for _ in range(_WARM_UP + steps)][_WARM_UP:]
    tokens = tokens_of_microbatch(spec) * spec.inner.microbatches
    share = "unknown peak" if tflops is None else f"{utilization(spec, median(seconds), tflops):.1%}"
    model = spec.model
    options = f"{compute.precision}" + ", compiled" * compute.compile
    options += ", checkpointed" * compute.activation_checkpointing
    return Table(
        "Model FLOPs utilization of a full replica",
        f"python -m benchmarks.mfu {' '.join(sys.argv[1:])}".strip(),
        ("device", "model", "microbatches", "options", "tokens/s", "MFU", "peak GB"),
        (
            (
                device,
                f"{spec.name}: {model.layers} layers of {model.width}, context {model.context}",
                f"{spec.inner.microbatches} of {spec.inner.microbatch_size}",
                options,
                f"{tokens / median(seconds):.0f}",
                share,
                f"{torch.cuda.max_memory_allocated(compute.device) / 1e9:.1f}",
            ),
        ),
        (
            f"Median of {steps} inner steps after {_WARM_UP}, AdamW included, without exchange of payloads.",
            f"Measured {machine()}.",
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.BF16)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--microbatch-size", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the GPU")
    chosen = parser.parse_args()
    changes = {} if chosen.microbatch_size is None else {"inner.microbatch_size": chosen.microbatch_size}
    spec = resolve(chosen.preset, overrides=changes)
    compute = Compute(chosen.device, chosen.compile, chosen.checkpointing, chosen.precision)
    try:
        print(measured(spec, compute, chosen.steps, chosen.peak_tflops).markdown)
    except NotHere as error:
        print(f"Not measured: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
