"""What must hold when a member computes on a GPU. Skipped where there is none."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from node.core.model.chunked_loss import chunked_loss
from node.core.model.init import initial_parameters
from node.core.model.transfer import copy_into, to_device
from node.core.optimizer.inner import OPTIMIZERS
from node.core.optimizer.outer_stage import OuterStage
from node.core.worker.compute import Compute
from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from node.experiment.in_process_swarm import LocalSwarm
from node.generate import next_token_loss
from node.moments.host_moments import HostMoments
from protocol.codec.payload import decode
from protocol.math.payload_layout import TensorLayout
from protocol.math.topk import sparsify
from protocol.run_files.resolve import resolve
from protocol.spec.outer import OuterSpec
from protocol.spec.run import RunSpec
from protocol.types import StageRange

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train(spec: RunSpec, members: list[Trainer], round_number: int, first: int) -> float:
    """One inner phase of a replica whose members hand their messages over directly."""
    for member in members:
        member.begin_round(round_number, range(first, first + spec.samples_per_round()))
    for step in range(spec.inner.steps):
        for microbatch in range(spec.inner.microbatches):
            message = None
            for member in members:
                message = member.forward(step, microbatch, message)
            for member in reversed(members):
                message = member.backward(microbatch, message)
        norm = math.sqrt(sum(member.inner.squared_gradient_norm() for member in members))
        for member in members:
            member.apply(step, norm)
    return members[-1].end_inner_phase().loss


def replica(spec: RunSpec, device: str, members: int) -> list[Trainer]:
    size = spec.swarm.stages // members
    stream = open_stream(spec)
    trainers = [
        Trainer(spec, StageRange(i * size, (i + 1) * size), Compute(device), None if i else stream)
        for i in range(members)
    ]
    for i, trainer in enumerate(trainers):
        trainer.connect(spec.link.k if i else None, spec.link.k if i < members - 1 else None)
    return trainers


def test_what_is_restored_on_a_gpu_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    spec = resolve("nano", overrides={"rounds": 3})
    (running,), (returned,) = replica(spec, "cuda", 1), replica(spec, "cuda", 1)
    train(spec, [running], 1, 0)
    for stage in spec_stages(spec):
        payload = running.outer.propose(stage)
        assert payload is not None
        running.commit(stage, 1, [(payload, 1.0)], mine_included=False)
    running.write_checkpoint(tmp_path / "round-000001", 1)
    restored = returned.restore(tmp_path)
    assert restored is not None
    assert restored.private is not None
    losses = [train(spec, [member], 2, 1000) for member in (running, returned)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for stage in spec_stages(spec):
        assert returned.outer[stage].digest() == running.outer[stage].digest()
        for name, error in returned.outer[stage].error.items():
            assert torch.equal(error, running.outer[stage].error[name])


def test_compiled_and_checkpointed_members_learn_what_others_learn() -> None:
    """bf16 on the GPU in all of them, and one replica there at a time."""
    overrides = {"swarm.replicas": 1, "swarm.pipelines": 1, "inner.steps": 3, "rounds": 2}
    spec = resolve("nano", overrides=overrides)
    computes = [
        Compute("cuda"),
        Compute("cuda", activation_checkpointing=True),
        Compute("cuda", compile=True),
        Compute("cuda", compile=True, activation_checkpointing=True),
    ]
    losses = []
    for compute in computes:
        swarm = LocalSwarm(spec, compute, resident=1)
        reports = [swarm.train_round() for _ in range(2)]
        losses.append([*(report.train_loss for report in reports), *swarm.validate()])
        assert all(report.contributions == (2,) * spec.swarm.stages for report in reports)
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=0.02)


def test_a_swarm_saved_on_a_gpu_is_restored_with_the_same_bits(tmp_path: Path) -> None:
    spec = resolve("nano", overrides={"swarm.replicas": 1, "swarm.pipelines": 1, "rounds": 2})
    swarm, other = LocalSwarm(spec, Compute("cuda"), resident=1), LocalSwarm(spec, Compute("cuda"))
    swarm.train_round()
    swarm.save(tmp_path)
    assert other.restore(tmp_path)
    assert other.position == 1
    for mine, theirs in zip(swarm.replicas, other.replicas, strict=True):
        for stage in spec_stages(spec):
            states = [replica.private_states()[stage] for replica in (mine, theirs)]
            assert states[0].moments is not None
            assert states[1].moments is not None
            for name, moment in states[0].moments["exp_avg_sq"].items():
                assert torch.equal(moment, states[1].moments["exp_avg_sq"][name])
            for name, error in states[0].error.items():
                assert torch.equal(error, states[1].error[name])
    assert swarm.validate() == pytest.approx(other.validate(), rel=1e-3)


def test_replicas_that_wait_are_not_in_the_memory_of_the_gpu() -> None:
    overrides = {"model.width": 256, "model.layers": 4, "swarm.stages": 4, "inner.steps": 1, "rounds": 2}
    spec = resolve("nano", overrides={**overrides, "swarm.replicas": 4, "swarm.pipelines": 4})

    def held(resident: int) -> int:
        """Bytes between two rounds."""
        gc.collect()
        before = torch.cuda.memory_allocated()
        swarm = LocalSwarm(spec, Compute("cuda"), resident=resident)
        swarm.train_round()
        swarm.validate()
        return torch.cuda.memory_allocated() - before

    assert 0 < held(1) < held(0) / 4


def spec_stages(spec: RunSpec) -> range:
    return range(spec.swarm.stages)


@pytest.mark.parametrize(
    "options",
    [{"link.dtype": "bf16"}, {"link.dtype": "dither5"}, {"inner.optimizer": "muon"}],
    ids=str,
)
def test_replicas_on_gpu_and_cpu_learn_alike_and_hold_the_same_anchor(options: dict[str, Any]) -> None:
    spec = resolve("nano", overrides={**options, "inner.steps": 5, "rounds": 3})
    replicas = [replica(spec, "cpu", 1), replica(spec, "cuda", 1), replica(spec, "cuda", 2)]
    for round_number in range(1, 4):
        losses = [train(spec, members, round_number, 1000 * round_number) for members in replicas]
        assert losses[0] == pytest.approx(losses[1], rel=0.05)
        assert losses[0] == pytest.approx(losses[2], rel=0.05)
        for stage in range(spec.swarm.stages):
            hosts = [next(m for m in members if stage in m.stages) for members in replicas]
            proposals = [host.outer.propose(stage) for host in hosts]
            payloads = [(payload, 1.0) for payload in proposals if payload is not None]
            assert len(payloads) == 3
            assert (
                len({host.commit(stage, round_number, payloads, mine_included=True) for host in hosts}) == 1
            )
            if stage == 0:
                replicas[2][1].commit_embedding(round_number, payloads)
        assert len({member.outer.embedding_digest() for members in replicas for member in members}) == 1
        for members in replicas:
            for member in members:
                for stage in member.stages:
                    for name, parameter in member.modules[stage].canonical_parameters().items():
                        assert torch.equal(parameter.detach().cpu(), member.outer[stage].anchor[name])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantizer": "1bit", "indices": "enumerative"},
        {"quantizer": "none", "top_k": 128},
        {"top_k": 0},
    ],
    ids=str,
)
def test_what_is_sent_of_a_tensor_is_the_same_wherever_the_tensor_is(options: dict[str, Any]) -> None:
    layout = TensorLayout((400, 2048), OuterSpec(**options))
    tensor = torch.randn(layout.shape, generator=torch.Generator().manual_seed(0))
    tensor[:20] = 0  # crowded rows, and ties
    tensor[20:40] = tensor[20:40].round()
    here, there = sparsify(tensor, layout), sparsify(tensor.cuda(), layout)
    assert there.codes_s.device.type == "cpu"
    assert torch.equal(here.values_s, there.values_s)
    if here.indices_s is not None and there.indices_s is not None:
        assert torch.equal(here.indices_s, there.indices_s)


@pytest.mark.parametrize("options", [{}, {"top_k": 0}], ids=str)
def test_a_proposal_from_a_gpu_and_its_error_feedback_are_all_that_was_learned(
    options: dict[str, Any],
) -> None:
    spec = resolve("nano", overrides={f"outer.{key}": value for key, value in options.items()})
    start = initial_parameters(spec, 0)
    local = {name: (value + 0.01 * torch.randn(value.shape)).cuda() for name, value in start.items()}
    learned = {name: value - local[name].cpu() for name, value in start.items()}
    outer = OuterStage(spec, 0, start)
    payload = outer.propose(local)
    assert payload is not None
    outer.commit([(payload, 1.0)], True, local)
    for name, sparse in decode(outer.layout, payload).items():
        total = outer.error[name].clone()
        sparse.add_to(total.view(-1), 1.0)
        torch.testing.assert_close(total, learned[name], rtol=0, atol=1e-6)
        assert torch.equal(local[name].cpu(), outer.anchor[name])
    local[name].view(-1)[0] = math.nan
    assert outer.propose(local) is None


def test_a_source_may_change_as_soon_as_its_copy_to_the_gpu_is_ordered() -> None:
    device, count = torch.device("cuda"), 2**22 + 5  # more than one pinned block
    source = torch.arange(count, dtype=torch.float32)
    expected, target = source.clone(), torch.nn.Parameter(torch.zeros(count, device=device))
    product = torch.randn(8192, 8192, device=device)
    for _ in range(10):  # the copies wait in the queue behind these
        product = product @ product
    there = to_device(source, device)
    copy_into(target, source)
    source.fill_(-1)
    assert torch.equal(there.cpu(), expected)
    assert torch.equal(target.detach().cpu(), expected)


def test_reading_samples_does_not_wait_for_the_gpu() -> None:
    spec = resolve("nano", overrides={"inner.microbatches": 1})
    [member] = replica(spec, "cuda", 1)
    member.begin_round(1, range(spec.samples_per_round()))
    member.forward(0, 0, None)  # loads kernels
    member.backward(0, None)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        member.forward(0, 0, None)
        member.backward(0, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_in_chunks_is_that_of_the_whole_logits(rows: int, precision: str) -> None:
    chance = torch.Generator("cuda").manual_seed(0)
    x_bld = torch.randn(4, 250, 64, device="cuda", generator=chance).requires_grad_()
    head_vd = (0.02 * torch.randn(5000, 64, device="cuda", generator=chance)).requires_grad_()
    targets_bl = torch.randint(5000, (4, 250), device="cuda", generator=chance)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        whole = next_token_loss((x_bld @ head_vd.t()).float(), targets_bl)
        loss = chunked_loss(x_bld, head_vd, targets_bl, rows)
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert loss.item() == pytest.approx(whole.item(), rel=tolerance)
    for one, other in zip(
        *(torch.autograd.grad(each, (x_bld, head_vd)) for each in (loss, whole)), strict=True
    ):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_saved_on_a_gpu_continue_with_the_same_step(optimizer: str) -> None:
    overrides = {"swarm.stages": 1, "swarm.pipelines": 0, "inner.optimizer": optimizer}
    spec = resolve("nano", overrides=overrides)
    (running,), (other,) = replica(spec, "cuda", 1), replica(spec, "cuda", 1)
    train(spec, [running], 1, 0)
    other.inner.load_state_dict(running.inner.state_dict())
    for name, parameter in running.parameters(0).items():
        other.parameters(0)[name].data.copy_(parameter)
    for member in (running, other):
        generator = torch.Generator("cuda").manual_seed(1)
        for parameter in member.parameters(0).values():
            parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator)
        member.inner.step(spec.inner.steps, 1.0)
    for name, parameter in running.parameters(0).items():
        assert torch.equal(parameter, other.parameters(0)[name])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_in_main_memory_give_the_bits_of_moments_on_the_card(kind: str) -> None:
    """Pieces are copied on streams of their own, beside the arithmetic."""

    def groups() -> list[dict[str, Any]]:
        shapes = {"emb": (4096, 256), "0.wq": (256, 512), "0.wd": (512, 256), "norm": (256,)}
        generator = torch.Generator("cuda").manual_seed(0)
        made = {name: torch.randn(each, generator=generator, device="cuda") for name, each in shapes.items()}
        return [{"params": [*made.items()], "weight_decay": 0.1}]

    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    usual = OPTIMIZERS[kind](groups(), **options)
    hosted = HostMoments(groups(), kind=OPTIMIZERS[kind], piece=2**14, **options)
    [one], [other] = usual.param_groups, hosted.param_groups
    for _ in range(4):
        for mine, theirs in zip(one["params"], other["params"], strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        usual.step()
        hosted.step()
    for mine, theirs in zip(one["params"], other["params"], strict=True):
        assert torch.equal(mine, theirs)
        for name in usual.state[mine].keys() - {"step"}:
            assert hosted.state[theirs][name].is_pinned()
            assert torch.equal(hosted.state[theirs][name], usual.state[mine][name].cpu())
