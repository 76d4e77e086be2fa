"""The model in stages: cut anywhere it is the same model, and it starts from the same bits everywhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from node.core.model.init import initial_parameters
from node.core.model.shapes import parameter_shapes
from node.core.model.stage import Stage, backward_from
from node.generate import WholeModel, next_token_loss
from protocol.math.outer_step import anchor_digest
from protocol.math.subspace import (
    ReceivingEnd,
    SendingEnd,
    orthonormal_basis,
    perpendicular_table,
)
from protocol.run_files.presets import PRESETS
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.models import scalars_of
from tests.support.paths import ROOT
from tests.support.reference import chain_step, gradients_of, parameters_of, small_spec, stages_of

SPEC = small_spec()
ONE = {"stages": 1, "pipelines": 0}


def batch(spec: RunSpec = SPEC) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.model.vocabulary, (3, spec.model.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def whole_model(spec: RunSpec = SPEC) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients in a single process: all stages in one autograd graph."""
    stages = stages_of(spec)
    loss, _, _ = chain_step([stages], [], *batch(spec))
    return loss, gradients_of(stages)


def link(k: int, basis_dd: Tensor, table_vd: Tensor) -> tuple[SendingEnd, ReceivingEnd]:
    return SendingEnd(k, basis_dd), ReceivingEnd(k, basis_dd, table_vd)


OUTPUTS = small_spec(model={"norms": "outputs"})


@pytest.mark.parametrize("spec", [SPEC, OUTPUTS], ids=["norms of inputs", "norms of outputs"])
@pytest.mark.parametrize("cuts", [(2,), (1, 2, 3), (3,)], ids=["2 members", "4 members", "uneven"])
def test_members_with_uncompressed_links_equal_the_single_process(
    cuts: tuple[int, ...], spec: RunSpec
) -> None:
    loss, gradients = whole_model(spec)
    stages = stages_of(spec)
    bounds = (0, *cuts, len(stages))
    members = [stages[first:stop] for first, stop in itertools.pairwise(bounds)]
    uncompressed = link(0, orthonormal_basis(spec.model.width, 0), stages[0].emb)
    split_loss, _, _ = chain_step(members, [uncompressed] * len(cuts), *batch())
    assert torch.equal(split_loss, loss)
    for name, gradient in gradients_of(stages).items():
        assert torch.equal(gradient, gradients[name]), name


def test_a_link_of_full_width_equals_no_compression() -> None:
    loss, gradients = whole_model()
    stages = stages_of(SPEC)
    width = SPEC.model.width
    # The run's basis is rounded to float32; its float64 continuation is orthonormal to 1e-16.
    basis, _ = torch.linalg.qr(orthonormal_basis(width, SPEC.seed).double())
    links = [link(width, basis, stages[0].emb) for _ in stages[1:]]
    split_loss, _, _ = chain_step([[stage] for stage in stages], links, *batch())
    assert abs(split_loss - loss) < 1e-12
    for name, gradient in gradients_of(stages).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 4, 16])
def test_projected_backward_is_the_gradient_of_the_projected_forward(k: int) -> None:
    basis = orthonormal_basis(SPEC.model.width, SPEC.seed).double()
    split = stages_of(SPEC)
    links = [link(k, basis, split[0].emb) for _ in split[1:]]
    ids, targets = batch()
    loss, _, _ = chain_step([[stage] for stage in split], links, ids, targets)

    whole = stages_of(SPEC)
    x = ids
    for position, stage in enumerate(whole):
        x = stage(x)
        if position < len(links):
            sender, receiver = links[position]
            x = receiver.expand_forward(sender.compress_forward(x), ids)
    oracle = next_token_loss(x, targets)
    oracle.backward()
    assert abs(oracle - loss) < 1e-12
    expected = gradients_of(whole)
    for name, gradient in gradients_of(split).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


def test_the_basis_is_orthonormal_nested_and_a_function_of_the_seed() -> None:
    basis = orthonormal_basis(16, 3)
    assert basis.dtype == torch.float32
    torch.testing.assert_close(basis.T @ basis, torch.eye(16), rtol=0, atol=1e-6)
    assert torch.equal(basis, orthonormal_basis(16, 3))
    assert not torch.equal(basis, orthonormal_basis(16, 4))
    # Both ends of a link build it apart: the signs must not depend on the LAPACK at hand.
    fixed = [[0.7169501, -0.3439736, -0.6063536], [0.6971036, 0.3604818, 0.6197576]]
    torch.testing.assert_close(orthonormal_basis(3, 3)[:2], torch.tensor(fixed), rtol=0, atol=1e-6)
    for k in (4, 8):
        # U of a link is the first k columns: the identity goes through as these.
        assert torch.equal(SendingEnd(k, basis).compress_forward(torch.eye(16)), basis[:, :k])


def test_a_link_follows_the_embedding_only_when_it_is_refreshed() -> None:
    basis = orthonormal_basis(16, 0)
    table, moved = torch.randn(19, 16), torch.randn(19, 16)
    end = ReceivingEnd(4, basis, table)
    ids, zeros = torch.arange(19).view(1, 19), torch.zeros(1, 19, 4)
    assert torch.equal(end.expand_forward(zeros, ids)[0], perpendicular_table(table, basis[:, :4]))
    end.refresh(moved)
    assert torch.equal(end.expand_forward(zeros, ids)[0], perpendicular_table(moved, basis[:, :4]))


def test_a_token_sees_its_past_and_never_its_future() -> None:
    stages = stages_of(SPEC)
    ids, _ = batch()
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % SPEC.model.vocabulary

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for stage in stages:
            x = stage(x)
        return x

    difference = (logits(ids) - logits(changed)).abs().amax(dim=(0, 2))
    assert (difference[:4] == 0).all()
    assert (difference[4:] > 0).all()


APART = {"tokenizer": "tokenizer.json", "pack": "documents", "separator": 0}


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"heads": 4, "key_value_heads": 2, "head_width": 4},
        {"rope_scaling": "smollm3"},
        {"norms": "outputs"},
    ],
    ids=str,
)
def test_a_document_in_a_sample_is_read_as_if_it_were_alone(model: dict[str, object]) -> None:
    """Positions, too: RoPE depends on distances alone."""
    spec = small_spec(model=model, data=APART)
    apart, joined = WholeModel(stages_of(spec)), WholeModel(stages_of(small_spec(model=model)))
    ids = torch.tensor([[3, 5, 0, 7, 3, 0, 0, 2], [0, 1, 2, 3, 4, 5, 6, 7]])[:, : spec.model.context]
    assert spec.model.context >= 8
    found, alone = apart(ids), joined
    begins = [0, 2, 5, 6, 8]  # a separator is the first token of a document
    for first, stop in itertools.pairwise(begins):
        torch.testing.assert_close(found[0, first:stop], alone(ids[:1, first:stop])[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], joined(ids)[1], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], joined(ids)[0], atol=1e-4)


def test_training_works_after_an_evaluation_under_inference_mode() -> None:
    # A context of its own, so that the rotary tables are made under inference mode.
    spec = small_spec(model={"context": 7})
    ids, targets = batch(spec)
    stages = stages_of(spec)
    with torch.inference_mode():
        x = ids
        for stage in stages:
            x = stage(x)
    chain_step([stages], [], ids, targets)
    assert gradients_of(stages)


def test_parameters_have_the_canonical_names_and_shapes() -> None:
    for stage, module in enumerate(stages_of(SPEC)):
        live = module.canonical_parameters()
        assert {name: tuple(value.shape) for name, value in live.items()} == parameter_shapes(SPEC, stage)
        assert list(live) == list(parameter_shapes(SPEC, stage))
        assert len(live) == len(list(module.parameters()))
        assert sum(value.numel() for value in live.values()) == SPEC.parameters_of(stage)
    first, last = parameter_shapes(SPEC, 0), parameter_shapes(SPEC, 3)
    assert next(iter(first)) == "emb"
    assert list(last)[-2:] == ["norm_f", "head"]
    assert "1.wq" in parameter_shapes(SPEC, 1)


PLAIN = {"link.dtype": "bf16", "link.gradient_dtype": "", "outer.indices": "elias-fano"}
"""The formats of the core: leaves have others, which presets name."""


@pytest.mark.parametrize(
    ("preset", "parameters"), [("178m", 177_622_016), ("512m", 427_464_192), ("1b", 1_204_881_408)]
)
def test_a_preset_of_the_paper_has_the_parameters_that_the_documents_state(
    preset: str, parameters: int
) -> None:
    spec = resolve(preset, overrides=PLAIN)
    assert spec.parameters == parameters
    assert f"{parameters / 1e6:,.1f}M" in (ROOT / "docs" / "research.md").read_text()


def test_every_preset_cuts_into_stages_that_hold_all_layers_once() -> None:
    for preset in PRESETS:
        spec = resolve(preset, overrides=PLAIN)
        names = [name for stage in range(spec.swarm.stages) for name in parameter_shapes(spec, stage)]
        assert len(names) == len(set(names)) == 9 * spec.model.layers + 3


def test_initial_parameters_are_the_same_bits_on_every_machine() -> None:
    # The digests are part of the protocol: replicas start from these bits without comparing them.
    assert [anchor_digest(initial_parameters(SPEC, stage))[:16] for stage in range(4)] == [
        "b1a0eb31d18dbcd7",
        "a2d2853118c08c74",
        "e3d86f14cce73cd4",
        "9b1afb7d1b272a56",
    ]


def test_initial_parameters_have_the_spread_of_llama() -> None:
    spec = resolve("tiny")
    parameters = {
        name: value
        for stage in range(spec.swarm.stages)
        for name, value in initial_parameters(spec, stage).items()
    }
    for name, value in parameters.items():
        if value.dim() == 1:
            assert (value == 1).all()
            continue
        into_residual = name.endswith(("wo", "w_down"))
        std = 0.02 / math.sqrt(2 * spec.model.layers) if into_residual else 0.02
        assert float(value.std()) == pytest.approx(std, rel=0.03)
        assert abs(float(value.mean())) < 0.05 * std
        assert float(value.abs().max()) < math.sqrt(3) * std * 1.0001
    assert not torch.equal(parameters["0.wq"], parameters["0.wk"])
    assert not torch.equal(parameters["0.wq"], parameters["2.wq"])


def test_initial_parameters_depend_on_the_seed() -> None:
    other = SPEC.model_copy(update={"seed": 2**63 - 1})
    assert anchor_digest(initial_parameters(SPEC, 1)) != anchor_digest(initial_parameters(other, 1))


def test_a_fresh_model_predicts_nothing_yet() -> None:
    stages = [Stage(SPEC, stage) for stage in range(4)]
    loss, _, _ = chain_step([stages], [], *batch())
    assert float(loss) == pytest.approx(math.log(SPEC.model.vocabulary), abs=0.05)
    assert parameters_of(stages)["emb"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_backward_pass_from_a_gradient_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, gradient, weight = (
        (4 * torch.randn(size, generator=generator)).to(dtype) for size in ((3, 8, 16), (3, 8, 16), (16, 16))
    )
    weight.requires_grad_()
    output = torch.tanh(x @ weight).transpose(1, 2)
    torch.autograd.backward(output, gradient.transpose(1, 2), retain_graph=True)
    expected, weight.grad = weight.grad, None
    backward_from(output, gradient.transpose(1, 2))
    assert weight.grad is not None
    assert expected is not None
    assert weight.grad.equal(expected)


def test_a_gradient_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError):
        backward_from(torch.ones(2, 3, requires_grad=True), torch.ones(1, 3))


@pytest.mark.parametrize(
    "model",
    [
        {"key_value_heads": 1, "head_width": 6},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"norms": "outputs"},
        {"norms": "outputs", "key_value_heads": 1, "head_width": 6},
    ],
)
def test_the_cost_model_counts_the_parameters_of_every_architecture(model: dict[str, object]) -> None:
    spec = resolve("nano", overrides={f"model.{name}": value for name, value in model.items()})
    for stage in range(spec.swarm.stages):
        assert scalars_of(spec, stage) == spec.parameters_of(stage)
    initial = initial_parameters(spec, 0)
    assert all(not tensor.any() for name, tensor in initial.items() if ".b" in name)
    assert all(tensor.eq(1).all() for name, tensor in initial.items() if ".norm_" in name)


def test_a_tied_head_has_the_sum_of_both_gradients() -> None:
    """The derivative of the loss by a matrix that is used twice is the sum of those of both uses."""
    apart, tied = small_spec(swarm=ONE), small_spec(swarm=ONE, model={"tied_head": True})
    parameters = {name: tensor.double() for name, tensor in initial_parameters(tied, 0).items()}
    assert {*parameter_shapes(apart, 0)} - {*parameters} == {"head"}
    assert tied.parameters_of(0) == scalars_of(tied, 0) == apart.parameters_of(0) - 19 * 16
    found = []
    for spec, given in ((apart, {**parameters, "head": parameters["emb"].clone()}), (tied, parameters)):
        module = Stage(spec, 0, {name: tensor.clone() for name, tensor in given.items()})
        loss = module(*batch(spec))
        loss.backward()
        found.append((loss.item(), {name: each.grad for name, each in module.canonical_parameters().items()}))
    (loss, gradients), (tied_loss, tied_gradients) = found
    assert tied_loss == loss
    head = gradients.pop("head")
    gradients["emb"] = gradients["emb"] + head
    for name, gradient in tied_gradients.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-15)


def test_a_head_is_tied_in_a_run_of_one_stage_alone() -> None:
    with pytest.raises(ValueError, match=r"tied_head needs swarm.stages 1.* or model.tied_head false"):
        small_spec(model={"tied_head": True})
