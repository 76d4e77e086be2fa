"""The cost of the payload codec, compared with one ``abs().topk`` over the same chunks and with the entropy.

    python -m benchmarks.codec                        # a stage of 100M parameters, a few minutes
    python -m benchmarks.codec --quick                # 20M, below a minute
    python -m benchmarks.codec --parameters 500000000

All work runs on one core: the process pins itself to one if the system allows it. Seconds are CPU seconds,
the best of several passes, so that other work on the machine matters little.

"Propose" is all work of a replica at the end of an inner phase (node.core.optimizer.outer_stage):
pseudo-gradient, error feedback, top-k, quantizer, encoder. "Decode" checks and decodes one payload and takes
its norm, "apply" moves the anchor by it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import Table, machine
from node.core.model.shapes import parameter_shapes
from node.core.optimizer.outer_stage import OuterStage
from protocol.codec.payload import decode
from protocol.math.clipping import payload_norm
from protocol.math.outer_step import apply_update
from protocol.math.payload_layout import PayloadLayout
from protocol.run_files.resolve import resolve
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import PAYLOAD_QUANTIZERS
from protocol.spec.run import RunSpec

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"indices": "enumerative"},
    {"quantizer": "1bit"},
    {"indices": "enumerative", "quantizer": "1bit"},
    {"quantizer": "none"},
    {"top_k": 128},
    {"top_k": 128, "indices": "enumerative"},
)
"""Options of `outer` that differ from the default."""

COLUMNS = (
    "codec",
    "bytes per chunk",
    "over the entropy",
    "rest of the payload",
    "top-k s",
    "propose s",
    "propose / top-k",
    "decode s",
    "apply s",
    "propose: copies of memory",
)
_FULL, _QUICK = 100_000_000, 20_000_000
_LAYER = 12_453_888
"""Parameters of a layer of the 178m preset."""


def stage_spec(parameters: int, options: dict[str, Any]) -> RunSpec:
    """A run whose stage 0 has about `parameters` parameters: a third in the embedding, the rest in layers."""
    layers = max(round(parameters * 2 / 3 / _LAYER), 1)
    vocabulary = max((parameters - layers * _LAYER) // 1024 // 64, 4) * 64
    shape = {"model.vocabulary": vocabulary, "model.layers": 2 * layers, "swarm.stages": 2}
    codec = OuterSpec(**options).model_dump()
    return resolve("178m", overrides=shape | {f"outer.{key}": value for key, value in codec.items()})


def bytes_per_chunk(outer: OuterSpec) -> float:
    """Bytes that one full chunk takes. Eight chunks take whole bytes in every codec."""
    more, less = (PayloadLayout({"x": (64 * chunks, outer.chunk // 64)}, outer).nbytes for chunks in (16, 8))
    return (more - less) / 8


def entropy_bytes(outer: OuterSpec) -> float:
    """The lower bound for a full chunk, if all indices and all values of `bits` bits are equally likely."""
    bits = PAYLOAD_QUANTIZERS[outer.quantizer].bits
    return (math.log2(math.comb(outer.chunk, outer.top_k)) + bits * outer.top_k) / 8


def cpu_seconds(passes: int, *works: Callable[[], object]) -> list[float]:
    """The best of `passes` passes of each. All take turns, so that other work slows all of them."""
    best = [math.inf] * len(works)
    for _ in range(passes):
        for position, work in enumerate(works):
            start = time.process_time()
            work()
            best[position] = min(best[position], time.process_time() - start)
    return best


def peak_growth(work: Callable[[], object]) -> int | None:
    """The peak growth of this process's resident memory in bytes while `work` runs.

    None if the system does not measure it: only Linux can reset the peak.
    """
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    # Free memory that the allocator keeps would hide new allocations. Only glibc has this call.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    clear.write_text("5")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def trained(spec: RunSpec) -> tuple[OuterStage, dict[str, Tensor]]:
    """Stage 0 after an inner phase, with a non-zero error feedback.

    Rows of a matrix learn with different speeds, so chunks and magnitudes differ as in a real run.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(value: Tensor) -> Tensor:
        speeds = torch.randn(len(value), *[1] * (value.dim() - 1), generator=generator).exp_()
        return torch.randn(value.shape, generator=generator).mul_(speeds).mul_(1e-3)

    shapes = PayloadLayout(parameter_shapes(spec, 0), spec.outer).shapes
    outer = OuterStage(spec, 0, {name: torch.zeros(shape) for name, shape in shapes.items()})
    for name, error in outer.error.items():
        error.copy_(noise(error))
        outer.anchor[name].copy_(noise(error))
    return outer, {name: anchor - noise(anchor) for name, anchor in outer.anchor.items()}


def top_k_alone(outer: OuterStage, k: int) -> None:
    """The reference: one pass over all full chunks, in whole tensors."""
    for error in outer.error.values():
        full = error.numel() // 4096 * 4096
        if full:
            error.view(-1)[:full].view(-1, 4096).abs().topk(k, dim=1)


def row(parameters: int, options: dict[str, Any], passes: int) -> tuple[str, ...]:
    """The row of one codec."""
    spec = stage_spec(parameters, options)
    stage, local = trained(spec)
    size = sum(anchor.numel() for anchor in stage.anchor.values())

    def propose() -> None:
        assert stage.propose(local) is not None

    propose()  # tables are made, and code is loaded
    stage.abort()
    growth = peak_growth(propose)
    payload = stage.propose(local)
    assert payload is not None
    layout, content = stage.layout, decode(stage.layout, payload)
    alone, proposed, decoded, applied = cpu_seconds(
        passes,
        lambda: top_k_alone(stage, spec.outer.top_k),
        propose,
        lambda: payload_norm(decode(layout, payload)),
        lambda: apply_update(stage.anchor, [content], [1.0], OuterSpec()),
    )
    chunk = bytes_per_chunk(spec.outer)
    return (
        layout.codec,
        f"{chunk:g}",
        f"{chunk / entropy_bytes(spec.outer) - 1:.1%}",
        f"{layout.nbytes / (size / spec.outer.chunk * chunk) - 1:.2%}",
        f"{alone:.2f}",
        f"{proposed:.2f}",
        f"{proposed / alone:.2f}",
        f"{decoded:.3f}",
        f"{applied:.2f}",
        "" if growth is None else f"{growth / (4 * size):.2f}",
    )


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run the block on one core, if the system allows it, and with one thread."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    torch.set_num_threads(1)
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


def measure(parameters: int, passes: int) -> Table:
    """All codecs on a stage of about `parameters` parameters."""
    with one_core():
        rows = tuple(row(parameters, options, passes) for options in VARIANTS)
    size = sum(map(math.prod, parameter_shapes(stage_spec(parameters, {}), 0).values()))
    return Table(
        title="Payload codec",
        command=f"python -m benchmarks.codec --parameters {parameters}",
        columns=COLUMNS,
        rows=rows,
        notes=(
            f"One stage of {size / 1e6:.1f}M parameters on one core: {machine()}.",
            "Entropy: log2 C(chunk, k), and the bits of each value. The rest of the payload is what is not "
            "full chunks: header, magnitudes, short chunks.",
            "Top-k: one `abs().topk` over the same chunks, for the same k. Decode and apply: per payload.",
            "Memory: what the process grows by at most during a proposal. One copy of the stage is the error "
            "feedback that remains if the round is committed.",
        ),
    )


def table(quick: bool) -> Table:
    """For benchmarks/__main__.py."""
    return measure(_QUICK if quick else _FULL, 3 if quick else 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--parameters", type=int, default=None, help="of the stage")
    parser.add_argument("--quick", action="store_true", help="20M parameters, fewer passes")
    options = parser.parse_args()
    parameters = options.parameters or (_QUICK if options.quick else _FULL)
    print(measure(parameters, 3 if options.quick else 5).markdown)


if __name__ == "__main__":
    main()
