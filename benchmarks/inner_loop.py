"""The speed and memory of a full replica's inner steps, against plain training loops.

    python -m benchmarks.inner_loop --quick                    # a minute on two cores
    python -m benchmarks.inner_loop --sizes 10m 100m 128k      # some minutes
    python -m benchmarks.inner_loop --sizes 100m --device cuda --precision bf16

Three loops train the same model on the same tokens, and take turns within one process:

    replica         the trainer of a node that hosts all stages (node.core.worker.trainer)
    modules         the same modules in a plain loop: whole logits, torch's clipping and AdamW(fused=True)
    transformers    the same plain loop over transformers' Llama with SDPA

A turn is one inner step of each loop. A ratio is the median over the turns of (seconds of the plain loop /
seconds of the replica), so work beside the benchmark slows both sides of it. CPU seconds exclude the time in
which another process had the core; they are comparable with one thread only, because more threads wait by
spinning. Peak memory is measured in a process of its own for each loop.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.resident import resident
from benchmarks.tables import NotHere, Table, machine
from node.core.model.stage import Stage
from node.core.worker.compute import Compute
from node.core.worker.trainer import Trainer
from node.data.stream import Ordinals, Samples, SampleStream
from node.generate import next_token_loss
from node.ipc.worker_calls import Precision
from protocol.math.flops import tokens_of_microbatch
from protocol.run_files.resolve import resolve
from protocol.spec.fixed import BETAS, EPSILON
from protocol.spec.run import RunSpec
from protocol.types import StageRange

Step = Callable[[], object]


def _shape(
    vocabulary: int, width: int, layers: int, feed_forward: int, microbatch_size: int
) -> dict[str, int]:
    return {
        "model.vocabulary": vocabulary,
        "model.width": width,
        "model.layers": layers,
        "model.heads": width // 64,
        "model.feed_forward": feed_forward,
        "model.context": 256,
        "inner.microbatch_size": microbatch_size,
    }


SIZES: Mapping[str, Mapping[str, int]] = {
    "10m": _shape(8192, 256, 8, 704, 4),
    "100m": _shape(32_000, 768, 7, 2048, 2),
    "32k": _shape(32_000, 128, 2, 352, 8),
    "128k": _shape(128_000, 128, 2, 352, 8),
}
"""The last two are small models with large vocabularies, for the memory of their logits."""


class _RandomSplit:
    """Uniform token ids; reading takes next to no time."""

    def __init__(self, spec: RunSpec) -> None:
        self._model = spec.model

    def read(self, ordinals: Ordinals) -> Samples:
        chance = np.random.default_rng(ordinals[0])
        shape = len(ordinals), self._model.context + 1
        return chance.integers(self._model.vocabulary, size=shape, dtype=np.int32)


def spec_of(size: str) -> RunSpec:
    """A run of one full replica with a model of `size`, and two microbatches in a step."""
    of_replica = {"swarm.stages": 1, "swarm.replicas": 1, "swarm.pipelines": 0, "inner.microbatches": 2}
    return resolve("tiny", overrides={**of_replica, "inner.steps": 1000, **SIZES[size]})


def samples_of(spec: RunSpec) -> SampleStream:
    """Samples of random ids."""
    return SampleStream(_RandomSplit(spec), _RandomSplit(spec))


def replica_step(spec: RunSpec, compute: Compute) -> Step:
    """One inner step of a node that hosts all stages."""
    trainer = Trainer(spec, StageRange(0, spec.swarm.stages), compute, samples_of(spec))
    trainer.connect(None, None)
    trainer.begin_round(1, range(spec.samples_per_round()))
    number = iter(range(spec.inner.steps))

    def step() -> None:
        index = next(number)
        for microbatch in range(spec.inner.microbatches):
            trainer.forward(index, microbatch, None)
            trainer.backward(microbatch, None)
        trainer.apply(index, math.sqrt(trainer.inner.squared_gradient_norm()))

    return step


def modules_step(spec: RunSpec, compute: Compute) -> Step:
    """One step of a plain loop over the modules of a node."""
    stages = (Stage(spec, stage) for stage in range(spec.swarm.stages))
    return _plain_step(nn.Sequential(*stages), spec, compute)


def transformers_step(spec: RunSpec, compute: Compute) -> Step:
    """One step of a plain loop over transformers' Llama. Raises NotHere without transformers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  the other loops need it not
    except ImportError:
        raise NotHere("needs transformers: pip install transformers") from None
    model = spec.model
    config = LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.width,
        intermediate_size=model.feed_forward,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        max_position_embeddings=model.context,
        rms_norm_eps=model.norm_epsilon,
        attn_implementation="sdpa",
        use_cache=False,
    )
    llama = LlamaForCausalLM(config)
    return _plain_step(llama, spec, compute, lambda ids_bl: llama(ids_bl).logits)


def _plain_step(
    model: nn.Module, spec: RunSpec, compute: Compute, logits_of: Callable[[Tensor], Tensor] | None = None
) -> Step:
    stream, inner, device = samples_of(spec), spec.inner, compute.open()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), inner.learning_rate, BETAS, EPSILON, fused=True)
    forward, size, first = logits_of or model, inner.microbatch_size, 0

    def step() -> None:
        nonlocal first
        for _ in range(inner.microbatches):
            ids = torch.from_numpy(stream.read(range(first, first + size))).long().to(device)
            first += size
            with compute.autocast():
                loss = next_token_loss(forward(ids[:, :-1]).float(), ids[:, 1:])
            torch.autograd.backward(loss / inner.microbatches)
        nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: Mapping[str, Callable[[RunSpec, Compute], Step]] = {
    "replica": replica_step,
    "modules": modules_step,
    "transformers": transformers_step,
}


def inner_phase(trainer: Trainer, round_number: int) -> float:
    """Train the inner phase of a round by a member that hosts all stages. Returns the loss."""
    spec = trainer.spec
    first = spec.samples_per_round() * round_number
    trainer.begin_round(round_number, range(first, first + spec.samples_per_round()))
    for step in range(spec.inner.steps):
        for microbatch in range(spec.inner.microbatches):
            trainer.forward(step, microbatch, None)
            trainer.backward(microbatch, None)
        trainer.apply(step, math.sqrt(trainer.inner.squared_gradient_norm()))
    return trainer.end_inner_phase().loss


@dataclass(frozen=True)
class Turn:
    """Seconds of one inner step: of the clock, and of the processor in all threads of this process."""

    wall: float
    cpu: float


def turns_of(spec: RunSpec, compute: Compute, turns: int) -> dict[str, list[Turn]]:
    """One step of each loop in every turn. Two turns before them, which are not counted, warm up."""
    steps = {name: make(spec, compute) for name, make in LOOPS.items()}
    taken: dict[str, list[Turn]] = {name: [] for name in steps}
    for turn in range(-2, turns):
        for name, step in steps.items():
            took = timed(step, compute.device)
            if turn >= 0:
                taken[name].append(took)
    return taken


def timed(step: Step, device: str) -> Turn:
    """The time of one step, until the device has finished it."""
    gc.collect()  # not within the time of a loop that happens to trigger it
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return Turn(time.perf_counter() - wall, time.process_time() - cpu)


def peak_bytes(size: str, loop: str, compute: Compute, threads: int) -> int:
    """Peak memory of two steps of a loop above that of a process that has only imported it.

    Raises NotHere where Linux's /proc is missing.
    """
    if not Path("/proc/self/status").exists():
        raise NotHere("peak memory is read from /proc")
    options = ["--device", compute.device, "--precision", compute.precision, "--threads", str(threads)]
    command = [sys.executable, "-m", "benchmarks.inner_loop", "--sizes", size, "--peak", loop, *options]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def _peak_here(size: str, loop: str, compute: Compute) -> int:
    step = LOOPS[loop]
    if loop == "transformers":
        step(spec_of("32k"), compute)  # imports what it needs
    gc.collect()
    before = resident("VmRSS")
    run = step(spec_of(size), compute)
    run()
    run()
    if compute.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(compute.device)
    return resident("VmHWM") - before


def rows_of(spec: RunSpec, size: str, taken: Mapping[str, Sequence[Turn]], peaks: Mapping[str, int]) -> Any:
    """A row per loop. Ratios above 1: the replica is the faster one."""
    tokens = tokens_of_microbatch(spec) * spec.inner.microbatches
    parameters = spec.parameters
    for name, turns in taken.items():
        pairs = list(zip(turns, taken["replica"], strict=True))
        yield (
            f"{size}: {parameters / 1e6:.1f} M, V {spec.model.vocabulary}",
            name,
            f"{tokens / median(turn.wall for turn in turns):.0f}",
            f"{median(turn.wall / ours.wall for turn, ours in pairs):.2f}",
            f"{median(turn.cpu / ours.cpu for turn, ours in pairs):.2f}",
            f"{peaks[name] / 1e6:.0f}",
        )


def measured(sizes: Sequence[str], compute: Compute, turns: int, threads: int) -> Table:
    """The table of these sizes."""
    rows = []
    for size in sizes:
        spec = spec_of(size)
        peaks = {name: peak_bytes(size, name, compute, threads) for name in LOOPS}
        rows += rows_of(spec, size, turns_of(spec, compute, turns), peaks)
    kind = "" if compute.device == "cpu" else f" --device {compute.device}"
    precise = "" if compute.precision == Precision.AUTO else f" --precision {compute.precision}"
    return Table(
        "Inner steps of a full replica against plain loops",
        f"python -m benchmarks.inner_loop --sizes {' '.join(sizes)} --turns {turns} --threads {threads}"
        + kind + precise,
        ("model", "loop", "tokens/s", "replica's speed / its", "in CPU seconds", "peak MB"),
        tuple(rows),
        (
            f"Medians of {turns} turns with {threads} threads; a step has two microbatches.",
            "The replica's peak on a CPU includes the outer state (anchor and error feedback, 8 bytes per "
            "parameter), which the plain loops do not have.",
            f"Measured {machine()}.",
        ),
    )  # fmt: skip


def table(quick: bool) -> Table:
    """The model of 10M parameters; not quick: all sizes."""
    threads = torch.get_num_threads()
    return measured(("10m",) if quick else tuple(SIZES), Compute(), 5 if quick else 15, threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.AUTO)
    parser.add_argument("--peak", choices=LOOPS, help="print the peak memory of this loop, in bytes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compute = Compute(arguments.device, precision=arguments.precision)
    if arguments.peak:
        print(_peak_here(arguments.sizes[0], arguments.peak, compute))
        return
    made = partial(measured, arguments.sizes, compute, arguments.turns, arguments.threads)
    print((table(True) if arguments.quick else made()).markdown)


if __name__ == "__main__":
    main()
