"""How a member computes changes no more than the last bits of what it computes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.core.worker import compute as computing
from node.core.worker.compute import Compute, chosen_precision
from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream, open_stream
from node.experiment.in_process_swarm import LocalSwarm
from node.ipc.worker_calls import (
    Precision,
)
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from tests.support.running_replica import spec_of

CHECKPOINTED = Compute(activation_checkpointing=True)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks are traced into graphs, forward and backward, which then run without generated code."""
    monkeypatch.setattr(computing, "BACKEND", "aot_eager")
    yield
    torch.compiler.reset()


def spec_of_two(**overrides: Any) -> RunSpec:
    return spec_of(**{"swarm.stages": 2, "inner.steps": 2, "inner.microbatches": 1, **overrides})


APART = {"data.tokenizer": "tokenizer.json", "data.pack": "documents", "data.separator": ord("\n")}


@pytest.fixture(scope="module")
def stream() -> SampleStream:
    return open_stream(spec_of_two())


def trained(
    compute: Compute, stream: SampleStream, **overrides: Any
) -> tuple[Trainer, float, dict[str, Tensor]]:
    """A whole replica after one microbatch, with its loss and gradients."""
    spec = spec_of_two(**overrides)
    trainer = Trainer(spec, StageRange(0, 2), compute, stream)
    trainer.begin_round(1, range(spec.samples_per_round()))
    trainer.forward(0, 0, None)
    loss = float(trainer.hosted.losses[0])
    trainer.backward(0, None)
    gradients = {name: value.grad for name, value in parameters(trainer).items() if value.grad is not None}
    return trainer, loss, gradients


def parameters(trainer: Trainer) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for module in trainer.modules.values()
        for name, parameter in module.canonical_parameters().items()
    }


def blocks_run(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether gradients were wanted, of every forward pass of a block from now on."""
    seen: list[bool] = []
    plain = computing.LlamaBlock.attention

    def counting(*arguments: Any) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return plain(*arguments)

    monkeypatch.setattr(computing.LlamaBlock, "attention", counting)
    return seen


def test_checkpointed_gradients_are_equal_in_every_bit(
    stream: SampleStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = blocks_run(monkeypatch)
    _, loss, gradients = trained(Compute(), stream)
    layers = len(seen)
    trainer, same_loss, same_gradients = trained(CHECKPOINTED, stream)
    assert len(seen) == 3 * layers  # once more each
    assert same_loss == loss
    assert same_gradients.keys() == gradients.keys() == parameters(trainer).keys()
    assert all(torch.equal(value, gradients[name]) for name, value in same_gradients.items())
    trainer.evaluate(0, None)
    assert len(seen) == 4 * layers
    assert seen[-layers:] == [False] * layers


def test_checkpointing_keeps_less(stream: SampleStream) -> None:
    def kept(compute: Compute) -> int:
        spec = spec_of_two()
        trainer = Trainer(spec, StageRange(0, 2), compute, stream)
        trainer.begin_round(1, range(spec.samples_per_round()))
        sizes = []

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.forward(0, 0, None)
        return sum(sizes)

    assert kept(CHECKPOINTED) < kept(Compute()) / 2


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_give_the_same_gradients_and_keep_their_parameters(
    stream: SampleStream, tmp_path: Path, checkpointed: bool
) -> None:
    usual, loss, gradients = trained(Compute(), stream)
    trainer, same_loss, same_gradients = trained(Compute("cpu", True, checkpointed), stream)
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert same_gradients.keys() == gradients.keys()
    for name, value in same_gradients.items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-4, atol=1e-7, msg=name)
    # What others change in place is what the next pass computes with: a step, a commit, a checkpoint.
    for each in (usual, trainer):
        each.apply(0, 1.0)
        payload = each.outer.propose(0)
        assert payload is not None
        each.commit(0, 1, [(payload, 1.0)], mine_included=True)
        each.outer.abort(1, 1)
        each.evaluate(0, None)
    assert trainer.end_validation() == pytest.approx(usual.end_validation(), rel=1e-6)
    usual.write_checkpoint(tmp_path / "round-000001", 1)
    restored = Trainer(spec_of_two(), StageRange(0, 2), Compute("cpu", True, checkpointed), stream)
    assert restored.restore(tmp_path) is not None
    for each in (usual, restored):
        each.evaluate(0, None)
    assert restored.end_validation() == pytest.approx(usual.end_validation(), rel=1e-6)


@pytest.mark.parametrize("compute", [CHECKPOINTED, Compute(precision=Precision.BF16)], ids=str)
def test_documents_are_apart_however_a_member_computes(stream: SampleStream, compute: Compute) -> None:
    _, loss, _ = trained(Compute(), stream, **APART)
    _, found, gradients = trained(compute, stream, **APART)
    assert found == pytest.approx(loss, rel=1e-2 if compute.precision == Precision.BF16 else 0)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert loss != trained(Compute(), stream)[1]


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("data", [{}, APART], ids=["joined", "documents apart"])
def test_one_graph_serves_all_blocks_of_all_replicas(stream: SampleStream, data: dict[str, Any]) -> None:
    torch._dynamo.utils.counters.clear()
    swarm = LocalSwarm(spec_of_two(**{"swarm.pipelines": 1}, **data), Compute(compile=True), stream)
    swarm.train_round()
    swarm.validate()
    swarm.train_round()
    # Training of full replicas, and of members that get activations: theirs is wanted, and evaluation.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 3
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_generated_code_gives_the_same_gradients(stream: SampleStream) -> None:
    _, loss, gradients = trained(Compute(), stream)
    _, same_loss, same_gradients = trained(Compute(compile=True, activation_checkpointing=True), stream)
    assert same_loss == pytest.approx(loss, rel=1e-5)
    for name, value in same_gradients.items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-3, atol=1e-6, msg=name)


def test_bf16_is_close_to_fp32_and_leaves_the_parameters_in_fp32(stream: SampleStream) -> None:
    _, loss, _ = trained(Compute(), stream)
    trainer, rough, gradients = trained(Compute(precision=Precision.BF16), stream)
    assert rough != loss
    assert rough == pytest.approx(loss, rel=1e-2)
    assert {value.dtype for value in gradients.values()} == {torch.float32}
    assert {value.dtype for value in parameters(trainer).values()} == {torch.float32}
    trainer.evaluate(0, None)
    assert math.isfinite(trainer.end_validation())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("model", [{"model.qk_norm": True}, {"model.norms": "outputs"}], ids=str)
def test_norms_of_bf16_are_computed_in_their_own_type(stream: SampleStream, model: dict[str, Any]) -> None:
    """As on CUDA: torch has no fused norm for two types, and says so at each node."""
    spec = spec_of_two(**model)
    losses = []
    for precision in (Precision.FP32, Precision.BF16):
        trainer = Trainer(spec, StageRange(0, 2), Compute(precision=precision), stream)
        trainer.begin_round(1, range(spec.samples_per_round()))
        trainer.forward(0, 0, None)
        losses.append(float(trainer.hosted.losses[0]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]


def gpu(major: int, minor: int, architecture: str = "") -> SimpleNamespace:
    return SimpleNamespace(major=major, minor=minor, gcnArchName=architecture)


@pytest.mark.parametrize(
    ("found", "hip", "expected"),
    [
        (gpu(7, 5), None, "fp32"),
        (gpu(8, 0), None, "bf16"),
        (gpu(9, 0), None, "bf16"),
        # AMD's, by their architectures: MI50, RX 6800, MI250, MI300, MI350, RX 7900, RX 9070.
        (gpu(9, 0, "gfx906:sramecc+:xnack-"), "6.2", "fp32"),
        (gpu(10, 3, "gfx1030"), "6.2", "fp32"),
        (gpu(9, 0, "gfx90a:sramecc+:xnack-"), "6.2", "bf16"),
        (gpu(9, 4, "gfx942:sramecc+:xnack-"), "6.2", "bf16"),
        (gpu(9, 5, "gfx950"), "7.0", "bf16"),
        (gpu(11, 0, "gfx1100"), "6.2", "bf16"),
        (gpu(12, 0, "gfx1201"), "6.4", "bf16"),
    ],
    ids=str,
)
def test_a_gpu_computes_in_bf16_if_it_can_and_nobody_chose_otherwise(
    monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace, hip: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda")
    assert chosen_precision(device, Precision.AUTO) == expected
    for wanted in (Precision.FP32, Precision.BF16):
        assert chosen_precision(device, wanted) is wanted


@pytest.mark.usefixtures("_traced_only")
def test_nodes_with_different_options_train_alike_and_hold_the_same_anchor(stream: SampleStream) -> None:
    spec = spec_of_two()
    computes = [
        Compute(),
        CHECKPOINTED,
        Compute(compile=True),
        Compute(precision=Precision.BF16),
        Compute(compile=True, activation_checkpointing=True, precision=Precision.BF16),
    ]
    members = [Trainer(spec, StageRange(0, 2), compute, stream) for compute in computes]
    losses = []
    for member in members:
        member.begin_round(1, range(spec.samples_per_round()))
        for step in range(spec.inner.steps):
            member.forward(step, 0, None)
            member.backward(0, None)
            member.apply(step, math.sqrt(member.inner.squared_gradient_norm()))
        losses.append(member.end_inner_phase().loss)
    assert losses == pytest.approx([losses[0]] * len(members), rel=1e-2)
    assert losses[3] != losses[0]
    for stage in range(2):
        payloads = [member.outer.propose(stage) for member in members]
        assert len({*payloads}) >= 2  # they have not computed the same bits
        weighted = [(payload, 1.0) for payload in payloads if payload is not None]
        assert len(weighted) == len(members)
        assert len({member.commit(stage, 1, weighted, mine_included=True) for member in members}) == 1
    first = parameters(members[0])
    for member in members[1:]:
        assert all(torch.equal(value, first[name]) for name, value in parameters(member).items())
