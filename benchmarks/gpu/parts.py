"""The parts of ``make gpu``: each measures one thing on a device, and returns a table and its figures.

Each part runs in a process of its own (:mod:`benchmarks.gpu.__main__`), so that one that fails or takes all
memory leaves the others alone. With `toy`, a part takes seconds on a CPU and its figures mean nothing: so the
suite runs every line of it.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.setting import Figures, Measured, Setting, command_of
from benchmarks.inner_loop import inner_phase, replica_step, samples_of, timed
from benchmarks.mfu import peak_tflops, utilization
from benchmarks.tables import Table
from coordinator.placement.cost_model import memory_needed
from node.core.model.init import initial_parameters
from node.core.model.shapes import is_of_layer
from node.core.optimizer.adamw import AdamW
from node.core.optimizer.muon import Muon
from node.core.optimizer.outer_stage import OuterStage
from node.core.worker.compute import Compute
from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from node.ipc.worker_calls import Message, Precision
from protocol.codec.activation import pack_activation, unpack_activation
from protocol.math.flops import tokens_of_microbatch
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange


def _bf16(setting: Setting) -> Compute:
    return Compute(setting.device, precision=Precision.BF16)


def measure_speed(setting: Setting) -> Measured:
    """Tokens/s, MFU and peak memory of preset 1b as a full replica, against the memory that is planned."""
    rows, figures = [], {}
    peak = peak_tflops(torch.cuda.get_device_name(setting.device)) if setting.is_cuda else None
    variants = [(False, False, 4), (True, False, 4), (True, False, 8), (True, False, 16), (True, True, 16)]
    for compiled, checkpointed, size in variants[:1] if setting.toy else variants:
        microbatches = 1 if setting.toy else 32 // size
        spec = setting.large(**{"inner.microbatch_size": size, "inner.microbatches": microbatches})
        compute = Compute(setting.device, compiled and not setting.toy, checkpointed, Precision.BF16)
        name = f"{size} samples" + ", compiled" * compiled + ", checkpointed" * checkpointed
        try:
            figure = _speed_of(setting, spec, compute, peak)
        except torch.cuda.OutOfMemoryError:
            rows.append((name, "", "", "", "", "out of memory"))
            continue
        figures[name] = figure
        rows.append(
            (
                name,
                f"{figure['tokens_per_second']:.0f}",
                f"{figure['mfu']:.1%}",
                f"{figure['peak_bytes'] / 1e9:.1f}",
                f"{figure['planned_bytes'] / 1e9:.1f}",
                f"{figure['first_step_seconds']:.1f}",
            )
        )
    columns = ("microbatch", "tokens/s", "MFU", "peak GB", "planned GB", "first step s")
    notes = (
        "Inner steps of 32 samples with clipping and AdamW, bf16, without the exchange of payloads.",
        "Planned: what the placement of stages reckons with, without what the CUDA libraries take.",
    )
    return Table(
        "Speed and memory of preset 1b, full replica", command_of("speed"), columns, tuple(rows), notes
    ), figures


def _speed_of(setting: Setting, spec: RunSpec, compute: Compute, peak: float | None) -> Figures:
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.device)
    step = replica_step(spec, compute)
    seconds = [timed(step, setting.device).wall for _ in range(2 if setting.toy else 7)]
    tokens = tokens_of_microbatch(spec) * spec.inner.microbatches
    usual = median(seconds[1:])
    return {
        "tokens_per_second": tokens / usual,
        "mfu": utilization(spec, usual, peak) if peak else math.nan,
        "peak_bytes": torch.cuda.max_memory_allocated(setting.device) if setting.is_cuda else 0,
        "planned_bytes": memory_needed(spec, StageRange(0, spec.swarm.stages), 1, setting.device),
        "first_step_seconds": seconds[0],
    }


def measure_profile(setting: Setting) -> Measured:
    """The kernels of one inner step of preset 1b that take most of the device's time."""
    spec = setting.large(**{"inner.microbatch_size": 8, "inner.microbatches": 4})
    step = replica_step(spec, Compute(setting.device, not setting.toy, False, Precision.BF16))
    step()
    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if setting.is_cuda:
        activities = [torch.profiler.ProfilerActivity.CUDA]
    setting.synchronize()
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        setting.synchronize()
    wall = time.perf_counter() - start
    events = [
        (event.key, _device_us(event, setting) * 1e-6, event.count) for event in profiler.key_averages()
    ]
    total = sum(seconds for _, seconds, _ in events)
    events.sort(key=lambda event: -event[1])
    rows = tuple(
        (name[:90], f"{seconds * 1e3:.1f}", f"{seconds / total:.1%}", str(count))
        for name, seconds, count in events[:16]
    )
    figures = {"wall_seconds": wall, "busy_seconds": total}
    notes = (
        f"One compiled step of 4 microbatches of 8: {wall:.3f} s, in which kernels ran for {total:.3f} s.",
    )
    columns = ("kernel", "ms", "share", "calls")
    return Table("Where the time of a step goes", command_of("profile"), columns, rows, notes), figures


def _device_us(event: Any, setting: Setting) -> float:
    return float(event.self_device_time_total if setting.is_cuda else event.self_cpu_time_total)


def measure_parity(setting: Setting) -> Measured:
    """Losses of three replicas that commit the same payloads: CPU in fp32, the device in fp32 and in bf16."""
    overrides = {
        "inner.steps": 3 if setting.toy else 20,
        "rounds": 4,
        "swarm.stages": 1,
        "swarm.pipelines": 0,
    }
    spec = resolve("nano" if setting.toy else "tiny", overrides=overrides)
    computes = {
        "CPU, fp32": Compute("cpu", precision=Precision.FP32),
        "device, fp32": Compute(setting.device, precision=Precision.FP32),
        "device, bf16": _bf16(setting),
    }
    stream = open_stream(spec)
    replicas = {
        name: Trainer(spec, StageRange(0, spec.swarm.stages), compute, stream)
        for name, compute in computes.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in replicas}
    digests = 0
    for replica in replicas.values():
        replica.connect(None, None)
    for round_number in range(1, 3 if setting.toy else 5):
        for name, replica in replicas.items():
            losses[name].append(inner_phase(replica, round_number))
        payloads = [(replica.outer.propose(0), 1.0) for replica in replicas.values()]
        kept = [(payload, weight) for payload, weight in payloads if payload is not None]
        digests = len({replica.commit(0, round_number, kept, True) for replica in replicas.values()})
        if digests != 1:
            raise RuntimeError(f"Round {round_number}: the anchors of the replicas differ.")
    base = losses["CPU, fp32"]
    figures = {name: {"losses": found} for name, found in losses.items()}
    rows = tuple(
        (
            name,
            " ".join(f"{loss:.4f}" for loss in found),
            f"{max(abs(loss / own - 1) for loss, own in zip(found, base, strict=True)):.2e}",
        )
        for name, found in losses.items()
    )
    notes = ("Anchors are equal in every bit after each round.",)
    columns = ("replica", "loss of the rounds", "largest relative difference")
    return Table("The same training on CPU and device", command_of("parity"), columns, rows, notes), figures


def measure_pipeline(setting: Setting) -> Measured:
    """Members of a pipeline of preset 1b on one card, one microbatch after another, by form of the link."""
    rows, figures = [], {}
    forms = [("uncompressed", 0, "bf16"), ("bf16", None, "bf16"), ("dither5", None, "dither5")]
    for name, k, dtype in forms[:3] if setting.toy else forms:
        overrides = {"link.dtype": dtype, "inner.microbatches": 2 if setting.toy else 8}
        overrides |= {"swarm.replicas": 0, "swarm.pipelines": 1, "inner.steps": 1000}
        spec = resolve("nano" if setting.toy else "1b", overrides=overrides)
        step, sent = _pipeline_step(spec, _bf16(setting), spec.link.k if k is None else k)
        step()
        sent.clear()
        seconds = setting.seconds(step, 4)
        tokens = tokens_of_microbatch(spec) * spec.inner.microbatches
        mean = sum(sent) / len(sent)
        figures[name] = {"tokens_per_second": tokens / seconds, "message_bytes": mean}
        rows.append((name, f"{tokens / seconds:.0f}", f"{mean / 1e6:.3f}"))
    notes = ("All four members take turns on one card: the costs of links on the device, without a network.",)
    columns = ("link", "tokens/s of the chain", "MB per message")
    return Table(
        "A pipeline of four on one card", command_of("pipeline"), columns, tuple(rows), notes
    ), figures


def _pipeline_step(spec: RunSpec, compute: Compute, k: int) -> tuple[Callable[[], None], list[int]]:
    stages, stream = spec.swarm.stages, samples_of(spec)
    members = [
        Trainer(spec, StageRange(stage, stage + 1), compute, None if stage else stream)
        for stage in range(stages)
    ]
    for stage, member in enumerate(members):
        member.connect(k if stage else None, k if stage < stages - 1 else None)
        member.begin_round(1, range(spec.samples_per_round()))
    numbers, sent = iter(range(spec.inner.steps)), list[int]()

    def step() -> None:
        number = next(numbers)
        for microbatch in range(spec.inner.microbatches):
            message: Message | None = None
            for member in members:
                message = member.forward(number, microbatch, message)
                if message is not None:
                    sent.append(len(message.payload))
            for member in reversed(members):
                message = member.backward(microbatch, message)
                if message is not None:
                    sent.append(len(message.payload))
        norm = math.sqrt(sum(member.inner.squared_gradient_norm() for member in members))
        for member in members:
            member.apply(number, norm)

    return step, sent


def measure_packing(setting: Setting) -> Measured:
    """Time to pack an activation of preset 1b on the device, and to unpack the bytes in main memory."""
    spec = setting.large()
    shape = (spec.inner.microbatch_size, spec.model.context, spec.link.k)
    x_blk = torch.randn(shape, device=setting.device)
    rows, figures = [], {}
    for dtype in ("bf16", "dither3", "dither5"):
        headers, data = pack_activation("x", x_blk, dtype)
        packed = setting.seconds(partial(pack_activation, "x", x_blk, dtype), 20)

        def unpack(headers: Any = headers, data: bytes = data, dtype: str = dtype) -> Tensor:
            return unpack_activation(headers, data, "x", shape, dtype).to(setting.device)

        unpacked = setting.seconds(unpack, 20)
        figures[dtype] = {"pack_seconds": packed, "unpack_seconds": unpacked, "bytes": len(data)}
        rows.append((dtype, f"{len(data) / 1e6:.3f}", f"{packed * 1e3:.2f}", f"{unpacked * 1e3:.2f}"))
    columns = ("link.dtype", "MB", "pack ms", "unpack ms, on the CPU, and copy back")
    title = f"Packing {' x '.join(map(str, shape))} values of a link"
    return Table(title, command_of("packing"), columns, tuple(rows)), figures


def measure_exchange(setting: Setting) -> Measured:
    """The outer step of the largest stage of preset 1b: propose from the device, screen, commit, digest."""
    spec = setting.large()
    start = initial_parameters(spec, 0)
    outer = OuterStage(spec, 0, start)
    local = {
        name: nn.Parameter(value.to(setting.device) + 1e-3 * torch.randn(value.shape, device=setting.device))
        for name, value in start.items()
    }
    figures: dict[str, Any] = {"parameters": spec.parameters_of(0), "threads": torch.get_num_threads()}
    payloads = []

    def propose() -> None:
        payload = outer.propose(local)
        assert payload is not None
        payloads[:] = [payload]

    figures["propose_seconds"] = setting.seconds(propose, 3)
    figures["payload_bytes"] = len(payloads[0])
    digest = setting.seconds(outer.digest, 3)
    for count in (1, 4, 16):
        began = time.perf_counter()
        outer.commit([(payloads[0], 1.0)] * count, True, local)
        setting.synchronize()
        figures[f"commit_{count}_seconds"] = time.perf_counter() - began
        propose()
    figures["digest_seconds"] = digest
    rows = (
        ("propose", f"{figures['propose_seconds']:.2f}"),
        *(
            (f"commit of {count} payloads", f"{figures[f'commit_{count}_seconds']:.2f}")
            for count in (1, 4, 16)
        ),
        ("digest", f"{digest:.2f}"),
    )
    notes = (
        f"{figures['parameters'] / 1e6:.0f} M parameters, payloads of "
        f"{figures['payload_bytes'] / 1e6:.1f} MB, {figures['threads']} threads.",
    )
    return Table("The outer step of a stage", command_of("exchange"), ("work", "s"), rows, notes), figures


def measure_optimizers(setting: Setting) -> Measured:
    """The inner optimizers' own time. Muon takes AdamW for embedding, head and norms."""
    spec = setting.large()
    named = []
    for stage in range(spec.swarm.stages):
        for name, value in initial_parameters(spec, stage).items():
            parameter = nn.Parameter(value.to(setting.device))
            parameter.grad = torch.randn_like(parameter)
            named.append((name, parameter))
    figures: dict[str, Any] = {}
    for title, kind in (("AdamW", AdamW), ("Muon", Muon)):
        groups = [{"params": named, "weight_decay": 0.1}]
        optimizer = kind(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
        figures[title] = setting.seconds(optimizer.step, 5)
        del optimizer
    rows = tuple((name, f"{seconds * 1e3:.1f}") for name, seconds in figures.items())
    turned = [parameter.numel() for name, parameter in named if is_of_layer(name, parameter.dim())]
    notes = (f"{sum(turned) / 1e6:.0f} M parameters are in the {len(turned)} matrices that Muon turns.",)
    return Table(
        "One step of the inner optimizer, preset 1b",
        command_of("optimizers"),
        ("optimizer", "ms"),
        rows,
        notes,
    ), figures


def measure_host(setting: Setting) -> Measured:
    """What state in main memory costs: copies both ways from pinned memory, and AdamW on the CPU."""
    count = 2**16 if setting.toy else 9 * 10**8
    here = torch.empty(count, dtype=torch.float32, pin_memory=setting.is_cuda)
    there = torch.zeros(count, device=setting.device)
    figures: dict[str, Any] = {"parameters": count, "threads": torch.get_num_threads()}
    up = setting.seconds(partial(there.copy_, here, non_blocking=True), 3)
    down = setting.seconds(partial(here.copy_, there, non_blocking=True), 3)
    figures |= {"to_device_gb_per_second": 4e-9 * count / up, "to_host_gb_per_second": 4e-9 * count / down}
    del there
    parameters = [(str(i), nn.Parameter(part)) for i, part in enumerate(here.split(max(1, count // 36)))]
    for _, parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = AdamW([{"params": parameters, "weight_decay": 0.1}], lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
    figures["adamw_on_cpu_seconds"] = setting.seconds(optimizer.step, 3)
    rows = (
        ("float32 from pinned memory to the device, GB/s", f"{figures['to_device_gb_per_second']:.1f}"),
        ("back, GB/s", f"{figures['to_host_gb_per_second']:.1f}"),
        ("fused AdamW in main memory, s", f"{figures['adamw_on_cpu_seconds']:.2f}"),
    )
    notes = (f"{count / 1e6:.0f} M parameters, {figures['threads']} threads on {os.cpu_count()} processors.",)
    return Table(
        "State of a stage in main memory", command_of("host"), ("work", "figure"), rows, notes
    ), figures
