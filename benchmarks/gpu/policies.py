"""A stage of preset 8b on a card that torch holds to 16 GB, with each policy of protocol.memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from benchmarks.gpu.setting import Measured, Setting, command_of
from benchmarks.tables import Table
from node.core.optimizer.inner import OPTIMIZERS
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.core.worker.trainer import Trainer
from node.ipc.worker_calls import Message, Precision
from node.moments.host_moments import HOST_OPTIMIZERS
from protocol.codec.activation import pack_activation, pack_ids
from protocol.math.flops import microbatch_flops
from protocol.math.microbatch_order import OpKind, one_forward_one_backward
from protocol.memory.needs import BY_PRICE, MemoryPolicy, members_left, memory_need
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange

_LIMIT, _STAGES = 16 * 10**9, StageRange(1, 2)


def measure_memory(setting: Setting) -> Measured:
    """Memory and time of an inner step of the second member of a chain, against the plan."""
    spec = _spec(setting.toy)
    if setting.is_cuda:
        total = torch.cuda.get_device_properties(setting.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, _LIMIT / total), setting.device)
    rows, figures = [], {}
    for policy in BY_PRICE:
        need = memory_need(spec, _STAGES, members_left(spec, _STAGES), setting.device, policy)
        planned = f"{need.device / 1e9:.1f}", f"{need.main / 1e9:.1f}"
        gc.collect()
        if setting.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(setting.device)
        try:
            found = _measured(setting, spec, policy)
        except torch.cuda.OutOfMemoryError:
            rows.append((str(policy), "above 16", planned[0], "", planned[1], "", ""))
            continue
        figures[str(policy)] = {**found, "planned_bytes": need.device, "planned_main_bytes": need.main}
        sizes = f"{found['peak_bytes'] / 1e9:.1f}", planned[0], f"{found['main_bytes'] / 1e9:.1f}", planned[1]
        times = f"{found['step_seconds']:.2f}", f"{found['optimizer_seconds']:.2f}"
        rows.append((str(policy), *sizes, *times))
    columns = ("policy", "card GB", "planned", "main GB", "planned", "step s", "of it the optimizer s")
    notes = (
        f"{spec.parameters_of(1) / 1e9:.2f}B parameters, Muon, bf16, {spec.inner.microbatches} "
        f"microbatches in the order of a chain of {spec.swarm.stages}; torch may take 16 GB of the card.",
        "Main: what the process holds at the end of a step. The plan has also the exchange of a round in it.",
    )
    title = "Memory of a stage of preset 8b by policy"
    return Table(title, command_of("memory"), columns, tuple(rows), notes), figures


def _spec(toy: bool) -> RunSpec:
    more: dict[str, Any] = {"link.dtype": "bf16", "link.gradient_dtype": "", "inner.steps": 1000}
    if toy:
        more |= {"model.layers": 3, "swarm.stages": 3, "swarm.pipelines": 1, "inner.optimizer": "muon"}
    return resolve("nano" if toy else "8b", overrides=more)


def _measured(setting: Setting, spec: RunSpec, policy: MemoryPolicy) -> Mapping[str, float]:
    compute = Compute(setting.device, False, policy.checkpointing, Precision.BF16)
    factories = TrainerFactories(optimizers=HOST_OPTIMIZERS if policy.host_moments else OPTIMIZERS)
    trainer = Trainer(spec, _STAGES, compute, None, factories)
    trainer.connect(spec.link.k, spec.link.k)
    trainer.begin_round(1, range(spec.samples_per_round()))
    down, up = _message(spec, "activation"), _message(spec, "gradient")
    order = one_forward_one_backward(_STAGES.first, spec.swarm.stages, spec.inner.microbatches)
    seconds, optimizing = math.inf, math.inf
    for step in range(2 if setting.toy else 3):
        setting.synchronize()
        start = time.perf_counter()
        for op in order:
            if op.kind is OpKind.FORWARD:
                trainer.forward(step, op.microbatch, down)
            else:
                trainer.backward(op.microbatch, up)
        norm = math.sqrt(trainer.inner.squared_gradient_norm())
        setting.synchronize()
        computed = time.perf_counter()
        trainer.apply(step, norm)
        setting.synchronize()
        seconds = min(seconds, time.perf_counter() - start)
        optimizing = min(optimizing, time.perf_counter() - computed)
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(setting.device) if setting.is_cuda else 0,
        "main_bytes": psutil.Process().memory_info().rss,
        "step_seconds": seconds,
        "optimizer_seconds": optimizing,
        "flops": spec.inner.microbatches * microbatch_flops(spec, _STAGES) / seconds,
    }


def _message(spec: RunSpec, name: str) -> Message:
    """Small random values, and for an activation random tokens."""
    size, model = spec.inner.microbatch_size, spec.model
    generator = torch.Generator().manual_seed(0)
    values = 1e-2 * torch.randn(size, model.context, spec.link.k, generator=generator)
    headers, data = pack_activation(name, values, "bf16")
    if name == "gradient":
        return Message(headers, data)
    tokens = torch.randint(model.vocabulary, (size, model.context + 1), generator=generator)
    ids, ids_data = pack_ids("tokens", tokens, model.vocabulary)
    return Message((*headers, *ids), data + ids_data)
